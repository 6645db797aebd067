"""Ten SWE-bench rows made of real releases: the real fix solves each, by our pytest and by the official parsers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sandlot.errors import FailureKind
from sandlot.grading import grade
from sandlot.grading.check import check_task
from sandlot.grading.swebench import has_swebench, official
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import SwebenchGrading, Task, load_tasks

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILE = Path(__file__).parents[1] / "data" / "swebench" / "rows.jsonl"
TASKS = {task.id: task for task in load_tasks(FILE)}
OFFICIAL = pytest.mark.skipif(not has_swebench(), reason="the swebench package is not installed")


async def test_there_are_ten_and_each_is_of_the_form() -> None:
    assert len(TASKS) == 10
    for task in TASKS.values():
        assert isinstance(task.grading, SwebenchGrading)
        assert task.gold_patch
        assert task.grading.fail_to_pass


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_the_real_fix_is_1_and_nothing_is_0(backend: SandboxBackend, task: Task) -> None:
    checked = await check_task(task, backend, cheats=False)
    assert checked.faults == ()


@pytest.mark.slow
async def test_cheats_on_a_real_package_earn_nothing(backend: SandboxBackend) -> None:
    checked = await check_task(TASKS["pathspec__pathspec-0.12.1"], backend)
    assert checked.faults == ()
    assert len(checked.cheats) == 13


def by_log(task: Task, parser: str = "parse_log_pytest_v2") -> Task:
    """The task as a row of the newer data sets tells it: with a command and the name of an official parser."""
    grading = task.grading
    assert isinstance(grading, SwebenchGrading)
    names = [name for name in (*grading.fail_to_pass, *grading.pass_to_pass) if " " not in name]
    files = " ".join(dict.fromkeys(name.partition("::")[0] for name in names))
    return replace(
        task,
        grading=replace(
            grading,
            fail_to_pass=tuple(name for name in grading.fail_to_pass if name in names),
            pass_to_pass=tuple(name for name in grading.pass_to_pass if name in names),
            command=f"python3 -m pytest -rA --tb=no -p no:cacheprovider {files}",
            log_parser=parser,
        ),
    )


@OFFICIAL
@pytest.mark.parametrize("name", ["parse__parse-1.20.2", "xmltodict__xmltodict-0.14.0"])
async def test_the_official_parsers_say_the_same(backend: SandboxBackend, name: str) -> None:
    task = by_log(TASKS[name])
    gold = await grade(task, task.gold_patch or b"", backend)
    assert (gold.reward, gold.detail) == (1.0, ""), gold.evidence
    assert gold.evidence["parsed"]
    empty = await grade(task, b"", backend)
    assert empty.reward == 0.0


@OFFICIAL
async def test_an_unknown_parser_is_ungraded(backend: SandboxBackend) -> None:
    verdict = await grade(by_log(TASKS["parse__parse-1.20.2"], "parse_log_tea_leaves"), b"", backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)
    assert "no log parser called" in verdict.detail


@OFFICIAL
async def test_a_log_of_the_official_form() -> None:
    grading = SwebenchGrading(b"", ("t.py::a",), log_parser="parse_log_pytest")
    log = "PASSED t.py::a\nFAILED t.py::b - assert 0\nSKIPPED [1] t.py:3: no\nXFAIL t.py::c\n"
    assert official(grading, log) == {"t.py::a": "passed", "t.py::b": "failed", "t.py::c": "skipped"}


async def test_without_the_package_only_pytests_names_can_be_graded(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandlot.grading.swebench.has_swebench", lambda: False)
    task = by_log(TASKS["parse__parse-1.20.2"])
    assert (await grade(task, task.gold_patch or b"", backend)).reward == 1.0
    assert isinstance(task.grading, SwebenchGrading)
    other = replace(task, grading=replace(task.grading, fail_to_pass=("test_x (m.C)",)))
    verdict = await grade(other, b"", backend)
    assert verdict.reward is None
    assert "pip install 'sandlot[swebench]'" in verdict.detail


async def test_the_rows_are_what_the_data_set_would_hold() -> None:
    columns = {"instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "version"}
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        assert columns | {"FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"} <= row.keys()
