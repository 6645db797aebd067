"""Whatever stands in a row or a task file, loading gives a task or a refusal that says where."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandlot.errors import TaskError
from sandlot.tasks import Task, bundled_path, load_all
from sandlot.tasks.directory import load_task
from sandlot.tasks.harbor import harbor_task
from support.profiles import few

SWE = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "abc",
    "problem_statement": "x",
    "patch": "--- a/m\n+++ b/m\n@@ -1 +1 @@\n-x\n+y\n",
    "test_patch": "--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-x\n+y\n",
    "FAIL_TO_PASS": ["t.py::a"],
    "PASS_TO_PASS": ["t.py::b"],
    "version": "1",
    "limits": {"turns": 3},
    "options": {"credit": "fraction", "weights": {"a": 1}},
}
GOOD: list[dict[str, Any]] = [
    SWE,
    {**SWE, "eval_script": "x", "log_parser": "y", "eval_type": "pass_and_fail"},
    {**SWE, "test_cmds": ["x"]},
    {**SWE, "install_config": {}},
    {**{k: v for k, v in SWE.items() if k != "test_patch"}, "image_name": "i"},
    {
        **SWE,
        "before_repo_set_cmd": "x",
        "selected_test_files_to_run": '["t"]',
        "run_script": "x",
        "parser_script": "y",
        "dockerhub_tag": "z",
    },
    {
        "repo_name": "r",
        "commit_hash": "c",
        "docker_image": "d",
        "problem_statement": "x",
        "expected_output_json": '{"a": "PASSED"}',
        "execution_result_content": {"test_file_codes": ["x"], "test_file_names": ["t.py"]},
        "parsed_commit_content": {"file_diffs": [{"header": {"file": {"path": "m"}}, "old_file_content": "x"}]},
    },
    {"responses_create_params": {"metadata": {"instance_dict": SWE, "golden_patch": "x"}}},
    {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "label": "l",
        "metadata": {
            "image": "i",
            "workdir": "/w",
            "eval_cmd": "x",
            "files": {"a": {"base64": "AA=="}},
            "pre_commands": ["x"],
            "limits": {"turns": 3},
            "remote_env_info": {"f2p_script": "x"},
            "gold_patch": "x",
            "mutation": {"patch": "x", "removed": ["y"]},
            "options": {"reruns": 1},
        },
    },
    {
        "prompt": "p",
        "label": "l",
        "metadata": {
            "image": "i",
            "workdir": "/w",
            "grading": {"form": "harbor", "files": {"a": "b"}, "env": {"a": "b"}, "timeout": 3},
        },
    },
    {"source": "bundled", "id": "page-count"},
]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["[]", "{}", "[1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place; `...` takes it out."""
    copy = json.loads(json.dumps(value))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if new is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return copy


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=few.max_examples)
def test_a_row_becomes_a_task_or_a_refusal(tmp_path: Path, data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        where = list(places(row))
        if where:
            row = changed(row, data.draw(st.sampled_from(where)), data.draw(JSON | st.just(...)))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n", encoding="utf-8", errors="surrogatepass")
    loaded = load_all(path)
    assert len(loaded.tasks) + len(loaded.refused) == 1
    assert all(isinstance(task, Task) and task.id and task.statement.strip() for task in loaded.tasks)
    assert all(str(error).startswith(f"{path}: row 2: ") for error in loaded.refused)


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.arrow"])
def test_any_bytes_are_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert str(path) in _refusal(lambda: load_all(path).refused[0])


@given(JSON, st.sampled_from(["dataset_dict.json", "state.json", "registry.json"]), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=few.max_examples)
def test_any_table_of_contents_is_refused_by_name(tmp_path: Path, content: Any, name: str, inner: bool) -> None:
    place = tmp_path / name.partition(".")[0]
    place.mkdir(exist_ok=True)
    key = {"dataset_dict.json": "splits", "state.json": "_data_files"}.get(name)
    if inner:
        content = {key: content} if key else [{"tasks": content}]
    (place / name).write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")
    source = place if key else place / name
    assert str(place) in _refusal(lambda: load_all(source).refused[0])


@given(st.lists(st.dictionaries(st.sampled_from(sorted(SWE)), JSON), min_size=1, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=few.max_examples)
def test_rows_of_parquet_become_tasks_or_refusals(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        table = pa.Table.from_pylist([{**SWE, **row} for row in rows])
        pq.write_table(table, tmp_path / "rows.parquet")
    except (pa.ArrowException, UnicodeError, OverflowError):
        return  # no such file can be
    loaded = load_all(tmp_path / "rows.parquet")
    assert len(loaded.tasks) + len(loaded.refused) == len(rows)
    assert all("rows.parquet: row " in str(error) or "used twice" in str(error) for error in loaded.refused)


OURS = tomllib.loads((bundled_path() / "page-count/task.toml").read_text())


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=few.max_examples)
def test_a_task_directory_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    spec = OURS
    for _ in range(data.draw(st.integers(1, 2))):
        where = list(places(spec))
        value = data.draw(JSON.filter(_is_toml) | st.just(...))
        spec = changed(spec, data.draw(st.sampled_from(where)), value) if where else spec
    for name in ("tests/test_last_page.py", "repo.fi", "statement.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "task.toml").write_bytes(tomli_w.dumps(spec).encode("utf-8", "surrogatepass"))
    refusal = _refusal(lambda: load_task(tmp_path))
    assert not refusal or refusal.startswith(f"{tmp_path / 'task.toml'}: ")


HARBOR = tomllib.loads((Path(__file__).parents[1] / "data/harbor/unit-table/task.toml").read_text())


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=few.max_examples)
def test_a_harbor_task_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    spec = HARBOR
    for _ in range(data.draw(st.integers(1, 2))):
        where = list(places(spec))
        value = data.draw(JSON.filter(_is_toml) | st.just(...))
        spec = changed(spec, data.draw(st.sampled_from(where)), value) if where else spec
    (tmp_path / "tests").mkdir(exist_ok=True)
    (tmp_path / "environment" / "app").mkdir(parents=True, exist_ok=True)
    (tmp_path / "tests" / "test.sh").write_text("x")
    (tmp_path / "instruction.md").write_text("Do it.")
    (tmp_path / "task.toml").write_bytes(tomli_w.dumps(spec).encode("utf-8", "surrogatepass"))
    refusal = _refusal(lambda: harbor_task(tmp_path))
    assert not refusal or refusal.startswith(f"{tmp_path / 'task.toml'}: ")


def _refusal(load: Callable[[], Task | TaskError]) -> str:
    """What a loader refuses; empty for a task. Any other error gets through."""
    try:
        found = load()
    except TaskError as error:
        return str(error)
    return str(found) if isinstance(found, TaskError) else ""


def _is_toml(value: Any) -> bool:
    try:
        tomli_w.dumps({"x": value})
    except (TypeError, ValueError, UnicodeError):
        return False
    return True
