"""Write tasks of any form as rows of one form, which load as the same tasks."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import shutil
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandlot.errors import TaskError
from sandlot.tasks.row import Row
from sandlot.tasks.task import (
    DOCKERFILE,
    CommandGrading,
    Grading,
    GradingOptions,
    HarborGrading,
    Mutation,
    PytestGrading,
    R2EGrading,
    Repository,
    ScriptGrading,
    SwebenchGrading,
    SweProGrading,
    Task,
    TaskLimits,
)

FORMS: dict[str, type] = {
    "pytest": PytestGrading,
    "command": CommandGrading,
    "script": ScriptGrading,
    "swepro": SweProGrading,
    "swebench": SwebenchGrading,
    "r2e": R2EGrading,
    "harbor": HarborGrading,
}


def write_rows(tasks: Sequence[Task], out: Path) -> None:
    """Write one row per task to the JSONL file `out`; what they need of this machine goes to a directory beside it."""
    place = out.with_name(f"{out.stem}.repositories")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as lines:
        for task in tasks:
            lines.write(json.dumps(row_of(task, place), ensure_ascii=False) + "\n")


def row_of(task: Task, place: Path) -> dict[str, Any]:
    """The row of a task. Its repository, its solution script and the directory of its Dockerfile are copied into
    `place`, which is to lie beside the row's file. Blocking."""
    form = next((name for name, kind in FORMS.items() if type(task.grading) is kind), None)
    if form is None:
        raise TaskError(f"task {task.id}: no row can hold a grading of the kind {type(task.grading).__name__}")
    facts: dict[str, Any] = {
        **task.metadata,
        "instance_id": task.id,
        "image": _image(task, place),
        "workdir": task.workdir,
        "grading": {"form": form, **written(task.grading)},
    }
    if isinstance(task.grading, HarborGrading) and (solution := facts.get("solution")):
        facts["solution"] = _copied(Path(solution), place)
    if task.repository is not None:
        facts["repository"] = _repository(task.repository, place)
    if task.gold_patch is not None:
        facts["gold_patch"] = _bytes(task.gold_patch)
    if task.mutation is not None:
        facts["mutation"] = written(task.mutation)
    for key, value in (
        ("pre_commands", list(task.setup)),
        ("protected", list(task.protected)),
        ("hidden", list(task.hidden)),
        ("python", task.python),
    ):
        if value:
            facts[key] = value
    if task.limits != TaskLimits():
        facts["limits"] = dataclasses.asdict(task.limits)
    if task.options != GradingOptions():
        facts["options"] = {**dataclasses.asdict(task.options), "weights": dict(task.options.weights)}
    return {"prompt": task.statement, "label": task.id, "metadata": facts}


def _image(task: Task, place: Path) -> str:
    directory = task.image.removeprefix(DOCKERFILE)
    return task.image if directory == task.image else f"{DOCKERFILE}{_copied(Path(directory), place)}"


def _repository(repository: Repository, place: Path) -> dict[str, str]:
    if repository.fast_export is not None:
        place.mkdir(parents=True, exist_ok=True)
        data = repository.fast_export.read_bytes()
        target = place / f"{hashlib.sha256(data).hexdigest()[:16]}.fi"
        target.write_bytes(data)
        return {"fast_export": f"{place.name}/{target.name}", "base": repository.base}
    assert repository.directory is not None
    return {"directory": _copied(repository.directory, place), "base": repository.base}


def _copied(source: Path, place: Path) -> str:
    """Copy a directory into `place`; its path from the row's file."""
    source = source.resolve()
    target = place / f"{source.parent.name}-{hashlib.sha256(bytes(source)).hexdigest()[:8]}"
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, symlinks=True)
    except OSError as error:
        raise TaskError(f"{source} cannot be copied to {target}: {error}") from None
    return f"{place.name}/{target.name}"


def written(value: Any) -> dict[str, Any]:
    """A dataclass of strings, numbers, bytes, lists and mappings as JSON can hold it; what is at its default is left
    out."""
    found = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if item == default:
            continue
        if isinstance(item, bytes):
            item = _bytes(item)
        elif isinstance(item, tuple):
            item = list(item)
        elif isinstance(item, Mapping):
            item = {key: _bytes(v) if isinstance(v, bytes) else v for key, v in item.items()}
        found[field.name] = item
    return found


def _bytes(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def read_grading(row: Row, value: Mapping[str, Any], field: str) -> Grading:
    """The grading that `written` wrote, with its form."""
    form = row.needed(value, "form", f"{field}.form")
    if form not in FORMS:
        raise row.error(f"{field}.form", f"{form!r} is no form; there are {', '.join(FORMS)}")
    grading: Grading = read(row, FORMS[form], {k: v for k, v in value.items() if k != "form"}, field)
    if isinstance(grading, PytestGrading | SwebenchGrading | SweProGrading) and not grading.fail_to_pass:
        raise row.error(f"{field}.fail_to_pass", "names no test, so no patch could be told from no patch")
    for key in ("fail_to_pass", "pass_to_pass"):
        row.tests({key: list(getattr(grading, key, ()))}, field, key)
    return grading


def read_mutation(row: Row, value: Mapping[str, Any], field: str) -> Mutation:
    """The mutation that `written` wrote."""
    mutation: Mutation = read(row, Mutation, value, field)
    return mutation


def read(row: Row, kind: type, value: Mapping[str, Any], field: str) -> Any:
    """A dataclass from its written form, each field by its declared type; refusals name the field."""
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        raise row.error(f"{field}.{unknown[0]}", "is not a key of this form")
    found: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        name = f"{field}.{item.name}"
        if item.name not in value:
            required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
            if required:
                raise row.error(name, "is missing")
            continue
        found[item.name] = _value(row, hints[item.name], value, item.name, name)
    return kind(**found)


def _value(row: Row, hint: Any, source: Mapping[str, Any], key: str, name: str) -> Any:
    if hint is bytes:
        return row.content(source[key], name)
    if hint is str:
        return row.text(source, key, name)
    if hint is float:
        return row.seconds({"timeout": source[key]}, name, 0.0)
    if typing.get_origin(hint) is tuple:
        return row.strings({name: source[key]}, "", name)
    if typing.get_args(hint)[1] is bytes:
        return row.files(source, name, key)
    pairs = row.object(source, key, name)
    if not all(isinstance(item, str) for item in pairs.values()):
        raise row.error(name, "must map names to text")
    return dict(pairs)
