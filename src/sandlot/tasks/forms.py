"""Which form a row has, told from its columns, and one loader per form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sandlot.errors import TaskError
from sandlot.tasks.row import Row
from sandlot.tasks.rows import agent_task
from sandlot.tasks.sources import read_rows
from sandlot.tasks.swe import SWE_GYM_REPOS, gym, live, pro, rebench, smith, swebench
from sandlot.tasks.synthetic import r2e
from sandlot.tasks.task import Task

Convert = Callable[[Path, int, Mapping[str, Any]], Task]


def nemotron(path: Path, number: int, row: Mapping[str, Any]) -> Task:
    """A row of NeMo Gym's SWE agents: `responses_create_params.metadata.instance_dict` is a row of another form."""
    outer = Row(path, number, row)
    params = outer.object(row, "responses_create_params")
    field = "responses_create_params.metadata"
    facts = outer.object(params, "metadata", field) if params else row
    inner = dict(outer.object(facts, "instance_dict", f"{field}.instance_dict"))
    if not inner:
        raise outer.error(f"{field}.instance_dict", "is missing: the tests of the instance are told there")
    for key in ("instance_id", "problem_statement", "base_commit"):
        if not inner.get(key) and facts.get(key):
            inner[key] = facts[key]
    if not inner.get("patch") and facts.get("golden_patch"):
        inner["patch"] = facts["golden_patch"]
    return _CONVERT[form_of(outer, inner)](path, number, inner)


_CONVERT: dict[str, Convert] = {
    "rows": agent_task,
    "nemotron": nemotron,
    "swe-bench": swebench,
    "swe-bench-live": live,
    "swe-bench-pro": pro,
    "swe-gym": gym,
    "swe-rebench": rebench,
    "swe-smith": smith,
    "r2e-gym": r2e,
}


def form_of(where: Row, row: Mapping[str, Any]) -> str:
    """The form of a row, by its columns. `TaskError` when no form has such columns."""
    has = {key for key, value in row.items() if value is not None}
    if "metadata" in row:
        return "rows"
    if "responses_create_params" in has or "instance_dict" in has:
        return "nemotron"
    if "expected_output_json" in has:
        return "r2e-gym"
    if {"before_repo_set_cmd", "selected_test_files_to_run"} <= has:
        return "swe-bench-pro"
    if "FAIL_TO_PASS" in has and "test_patch" not in has and "patch" in has:
        return "swe-smith"
    if {"FAIL_TO_PASS", "test_patch"} <= has:
        if "install_config" in has:
            return "swe-rebench"
        if "test_cmds" in has:
            return "swe-bench-live"
        return "swe-gym" if str(row.get("repo")) in SWE_GYM_REPOS else "swe-bench"
    raise where.error(
        f"the columns {', '.join(sorted(row)) or 'of nothing'}", "are those of no known form; name it as `form:path`"
    )


def _load(path: Path, form: str | None = None) -> Iterator[Task | TaskError]:
    """Every row below `path` as a task, or why it is none."""
    for file, (number, row) in read_rows(path):
        if isinstance(row, TaskError):
            yield row
            continue
        if form == "selection" or (form is None and row.keys() == {"source", "id"}):
            yield from _selected(file, number, row)
            continue
        try:
            yield _CONVERT[form or form_of(Row(file, number, row), row)](file, number, row)
        except TaskError as error:
            yield error


def _selected(path: Path, number: int, row: Mapping[str, Any]) -> Iterator[Task | TaskError]:
    """The task called `id` of `source`; a relative source lies beside the file."""
    from sandlot.tasks.load import LOADERS

    where = Row(path, number, row)
    try:
        source, wanted = where.needed(row, "source"), where.needed(row, "id")
        form, colon, rest = source.partition(":")
        named = bool(colon) and form in LOADERS.names()
        place = rest if named else source
        if source != "bundled":
            place = str(path.parent / place)
            source = f"{form}:{place}" if named else place
        found = _tasks_of(where, source)
        if wanted not in found:
            raise where.error("id", f"there is no usable task {wanted!r} in {source}")
        yield found[wanted]
    except TaskError as error:
        yield error


_LAST: dict[str, dict[str, Task]] = {}
"""The tasks of the source that a selection named last: its rows mostly name one."""
_LOADING: list[str] = []
"""The sources of selections that are being loaded, so that one that names itself is seen."""


def _tasks_of(where: Row, source: str) -> dict[str, Task]:
    from sandlot.tasks.load import form_and_path, load_all

    try:
        place = str(form_and_path(source)[1].resolve())
        if place == str(where.path.resolve()) or place in _LOADING:
            raise where.error("source", f"{source} names itself")
        if source not in _LAST:
            _LOADING.append(place)
            try:
                tasks = {task.id: task for task in load_all(source).tasks}
            finally:
                _LOADING.remove(place)
            _LAST.clear()
            _LAST[source] = tasks
    except (TaskError, OSError, ValueError) as error:
        text = str(error)
        raise error if text.startswith(where.where) else where.error("source", text) from None
    return _LAST[source]


load_rows = partial(_load, form=None)
load_agent = partial(_load, form="rows")
load_selection = partial(_load, form="selection")
load_nemotron = partial(_load, form="nemotron")
load_swebench = partial(_load, form="swe-bench")
load_live = partial(_load, form="swe-bench-live")
load_pro = partial(_load, form="swe-bench-pro")
load_gym = partial(_load, form="swe-gym")
load_rebench = partial(_load, form="swe-rebench")
load_smith = partial(_load, form="swe-smith")
load_r2e = partial(_load, form="r2e-gym")
