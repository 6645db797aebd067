"""Sets of Harbor tasks: a `registry.json` whose tasks lie beside it or in git repositories, and a `dataset.toml`.

What only Harbor's hub holds is refused: nothing here asks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandlot.errors import TaskError
from sandlot.tasks.checked import explain, inside, read_toml, task_directories
from sandlot.tasks.git_source import GitSource
from sandlot.tasks.harbor import harbor_task
from sandlot.tasks.harbor_files import TaskFiles
from sandlot.tasks.load import registry_of
from sandlot.tasks.task import Task

_FORBID = ConfigDict(extra="forbid")
_Digest = Annotated[str, Field(pattern=r"^sha256:[a-f0-9]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*$")]


class _Dataset(BaseModel):
    model_config = _FORBID
    name: _Name
    version: str | None = None
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class _Reference(BaseModel):
    model_config = _FORBID
    name: _Name
    digest: _Digest


class _File(BaseModel):
    model_config = _FORBID
    path: str
    digest: _Digest | Literal[""] = ""


class _Manifest(BaseModel):
    """`files` make one number of a whole data set's rewards, which is nothing to its tasks."""

    model_config = _FORBID
    schema_version: str = "1.0"
    dataset: _Dataset
    metadata: dict[str, Any] = {}
    tasks: list[_Reference] = []
    files: list[_File] = []


def load_harbor(path: Path) -> Iterator[Task | TaskError]:
    """The task in `path`, the tasks in its directories by name, or those of a `registry.json` or `dataset.toml`."""
    if (found := registry_of(path)) is not None:
        yield from load_registry(*found)
        return
    if path.name == "dataset.toml":
        yield from load_manifest(path)
        return
    for place in task_directories(path):
        try:
            yield harbor_task(place)
        except TaskError as error:
            yield error


def load_registry(path: Path, wanted: str = "") -> Iterator[Task | TaskError]:
    """The tasks of a registry's data sets, or of the one called `wanted` (`name` or `name@version`)."""
    try:
        sets = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(sets, list) or not all(isinstance(s, dict) and isinstance(s.get("tasks"), list) for s in sets):
        raise TaskError(f"{path}: must be a list of data sets with tasks")
    chosen = _chosen(path, sets, wanted)
    number, sources = 0, _Sources(path)
    for dataset in sets:
        for entry in dataset["tasks"]:
            number += 1
            if any(dataset is one for one in chosen):
                try:
                    yield harbor_task(sources.place(entry, f"{path}: row {number}"))
                except TaskError as error:
                    yield error


def _chosen(path: Path, sets: list[Mapping[str, Any]], wanted: str) -> list[Mapping[str, Any]]:
    """The data sets that are asked for, one version of each."""
    name, _, version = wanted.partition("@")
    found = [s for s in sets if not wanted or (s.get("name") == name and version in ("", str(s.get("version", ""))))]
    if not found:
        known = ", ".join(sorted({f"{s.get('name')}@{s.get('version')}" for s in sets}))
        raise TaskError(f"{path}: has no data set {wanted!r}; there are {known or 'none'}")
    names = [str(s.get("name")) for s in found]
    if several := [one for one in names if names.count(one) > 1]:
        versions = ", ".join(str(s.get("version")) for s in found if str(s.get("name")) == several[0])
        raise TaskError(
            f"{path}: has several versions of {several[0]!r} ({versions}): name one, as {path}#{several[0]}@VERSION"
        )
    return found


class _Sources:
    """Where the entries of one registry lie: beside it, or in checkouts of git repositories."""

    def __init__(self, registry: Path) -> None:
        self._registry = registry
        self._git: dict[tuple[str, str], GitSource] = {}

    def place(self, entry: Any, where: str) -> Path:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
            raise TaskError(f"{where}: path: is missing")
        url, commit = (entry.get(key) or "" for key in ("git_url", "git_commit_id"))
        if not isinstance(url, str) or not isinstance(commit, str):
            raise TaskError(f"{where}: git_url, git_commit_id: must be text")
        if not url:
            return inside(self._registry.parent, entry["path"], "path", where)
        if (url, commit) not in self._git:
            self._git[url, commit] = GitSource(url, commit, beside=self._registry.parent)
        try:
            return self._git[url, commit].directory(entry["path"])
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from None


def load_manifest(path: Path) -> Iterator[Task | TaskError]:
    """The tasks of a `dataset.toml`, which lie in the directories beside it and must have the digests it tells."""
    try:
        manifest = _Manifest.model_validate(read_toml(path))
    except ValidationError as error:
        raise TaskError(f"{path}: {explain(error)} (outside of the subset of Harbor's format)") from None
    beside = {name: file.parent for file in sorted(path.parent.glob("*/task.toml")) if (name := _name_of(file))}
    for number, wanted in enumerate({(task.name, task.digest): task for task in manifest.tasks}.values(), 1):
        where = f"{path}: row {number}"
        try:
            yield _pinned(beside.get(wanted.name), wanted, where)
        except TaskError as error:
            yield error


def _pinned(place: Path | None, wanted: _Reference, where: str) -> Task:
    if place is None:
        raise TaskError(
            f"{where}: no directory beside it holds the task {wanted.name!r}, and Harbor's hub is not asked: get it "
            f"with `harbor download {wanted.name}@{wanted.digest}`"
        )
    try:
        digest = TaskFiles(place).digest
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: {place} cannot be read: {error}") from None
    if digest != wanted.digest:
        raise TaskError(
            f"{where}: digest: {place} is not what was published as {wanted.name!r}; if it is meant to be, run "
            "`harbor sync`"
        )
    return harbor_task(place)


def _name_of(file: Path) -> str:
    try:
        task = read_toml(file).get("task")
    except TaskError:
        return ""
    return str(task.get("name") or "") if isinstance(task, dict) else ""
