"""Rows that `convert` writes load as the same tasks, whatever form they had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.errors import TaskError
from sandlot.tasks import (
    CommandGrading,
    GradingOptions,
    HarborGrading,
    Mutation,
    PytestGrading,
    R2EGrading,
    ScriptGrading,
    SwebenchGrading,
    SweProGrading,
    Task,
    TaskLimits,
    load_tasks,
)
from sandlot.tasks.convert import row_of, write_rows
from sandlot.tasks.forms import agent_task
from support.harbor_sets import task as harbor_task
from support.profiles import few
from support.repositories import write

TEXT = st.text(min_size=1, max_size=20).filter(str.strip)
NAMES = st.lists(TEXT, min_size=1, max_size=3).map(tuple)
DATA = st.binary(max_size=20)
PATHS = st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5})?\.py", fullmatch=True)
FILES = st.dictionaries(PATHS, DATA, max_size=3)
SECONDS = st.floats(0.5, 5000)
GRADINGS = st.one_of(
    st.builds(PytestGrading, FILES, NAMES, NAMES, SECONDS, NAMES),
    st.builds(CommandGrading, TEXT, FILES, SECONDS),
    st.builds(ScriptGrading, TEXT, SECONDS),
    st.builds(SweProGrading, TEXT, TEXT, NAMES, NAMES, NAMES, TEXT, FILES, SECONDS),
    st.builds(SwebenchGrading, DATA, NAMES, NAMES, TEXT, TEXT, SECONDS),
    st.builds(R2EGrading, st.dictionaries(TEXT, TEXT, max_size=3), FILES, TEXT, SECONDS),
    st.builds(HarborGrading, FILES, st.dictionaries(TEXT, TEXT, max_size=2), TEXT, SECONDS),
)
TASKS = st.builds(
    Task,
    id=TEXT,
    statement=TEXT,
    grading=GRADINGS,
    image=st.just("registry.example/x:1"),
    workdir=st.just("/srv/x"),
    setup=NAMES | st.just(()),
    protected=NAMES | st.just(()),
    limits=st.builds(TaskLimits, SECONDS, st.integers(1, 99), st.integers(1, 10**6)),
    gold_patch=st.none() | st.binary(min_size=1, max_size=20),
    mutation=st.none() | st.builds(Mutation, DATA, NAMES),
    hidden=NAMES | st.just(()),
    python=st.just("") | TEXT,
    options=st.builds(GradingOptions, st.sampled_from(("all", "fraction")), st.integers(0, 10)),
    metadata=st.just({}) | st.just({"base_commit": "abc", "level": 3}),
)


@few
@given(TASKS)
def test_any_task_comes_back_as_it_was(task: Task) -> None:
    row = json.loads(json.dumps(row_of(task, Path("nowhere"))))
    assert agent_task(Path("rows.jsonl"), 1, row) == task


def test_the_bundled_tasks_come_back_with_their_repositories(tmp_path: Path) -> None:
    tasks = load_tasks("bundled")
    write_rows(tasks, tmp_path / "out" / "all.jsonl")
    again = load_tasks(tmp_path / "out" / "all.jsonl")
    assert [replace(task, repository=None) for task in again] == [replace(task, repository=None) for task in tasks]
    for old, new in zip(tasks, again, strict=True):
        assert old.repository is not None
        assert new.repository is not None
        assert old.repository.fast_export is not None
        assert new.repository.fast_export is not None
        assert new.repository.fast_export.parent == tmp_path / "out" / "all.repositories"
        assert new.repository.fast_export.read_bytes() == old.repository.fast_export.read_bytes()
        assert new.repository.base == old.repository.base


def test_what_was_written_can_be_moved(tmp_path: Path) -> None:
    place = harbor_task(tmp_path / "tasks", "a", docker_image="")
    write(place, {"solution/solve.sh": "true\n", "environment/Dockerfile": "FROM x\n", "environment/l": Path("gone")})
    for _ in range(2):  # once more over what is there
        write_rows(load_tasks(place), tmp_path / "out" / "all.jsonl")
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "tasks").rename(tmp_path / "gone")
    (task,) = load_tasks(tmp_path / "moved" / "all.jsonl")
    directory = Path(task.image.removeprefix("dockerfile:"))
    assert (directory / "Dockerfile").read_text() == "FROM x\n"
    solution = Path(str(task.metadata["solution"]))
    assert (solution / "solve.sh").read_text() == "true\n"
    assert {directory.parent, solution.parent} == {tmp_path / "moved" / "all.repositories"}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("solution", "/etc", "metadata.solution: '/etc' leads out"),
        ("solution", "..", "metadata.solution: '..' leads out"),
        ("image", "dockerfile:../x", "metadata.image: '../x' leads out"),
        ("image", "dockerfile:x", "metadata.image: 'x' does not exist"),
    ],
)
def test_a_row_names_nothing_beyond_its_own_directory(tmp_path: Path, key: str, value: str, reason: str) -> None:
    metadata = {"image": "i", "workdir": "/w", "grading": {"form": "harbor", "files": {"test.sh": ""}}, key: value}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", "label": "x", "metadata": metadata}) + "\n")
    with pytest.raises(TaskError) as refused:
        load_tasks(path)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("grading", "reason"),
    [
        ({"form": "jest"}, "metadata.grading.form: 'jest' is no form"),
        ({"form": "pytest", "files": {}}, "metadata.grading.fail_to_pass: is missing"),
        ({"form": "pytest", "files": {}, "fail_to_pass": []}, "metadata.grading.fail_to_pass: names no test"),
        ({"form": "pytest", "files": {"../x": ""}, "fail_to_pass": ["t"]}, "leads out"),
        ({"form": "pytest", "files": {}, "fail_to_pass": "t"}, "no JSON list"),
        ({"form": "command", "command": "x", "timeout": 0}, "metadata.grading.timeout"),
        ({"form": "command", "comand": "x"}, "metadata.grading.comand: is not a key"),
        ({"form": "swebench", "test_patch": 3, "fail_to_pass": ["t"]}, "metadata.grading.test_patch"),
        ({"form": "r2e", "expected": {"a": 1}}, "metadata.grading.expected: must map"),
    ],
)
def test_a_bad_grading_is_refused_by_field(tmp_path: Path, grading: dict[str, Any], reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    metadata = {"image": "i", "workdir": "/w", "grading": grading}
    path.write_text(json.dumps({"prompt": "p", "label": "x", "metadata": metadata}) + "\n")
    with pytest.raises(TaskError) as refused:
        load_tasks(path)
    assert reason in str(refused.value)
    assert "row 1" in str(refused.value)
