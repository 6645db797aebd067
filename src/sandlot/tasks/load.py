"""Find the loader of a task source and load its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandlot.errors import TaskError
from sandlot.registry import Registry
from sandlot.tasks.sources import SUFFIXES, is_dataset
from sandlot.tasks.task import Task

LOADERS = Registry(
    "sandlot.tasks",
    {
        "bundled": "sandlot.tasks.load:load_bundled",
        "directory": "sandlot.tasks.directory:load_directory",
        "harbor": "sandlot.tasks.harbor_registry:load_harbor",
        "dataset": "sandlot.tasks.forms:load_rows",
        "jsonl": "sandlot.tasks.forms:load_rows",
        "rows": "sandlot.tasks.forms:load_agent",
        "selection": "sandlot.tasks.forms:load_selection",
        "swe-bench": "sandlot.tasks.forms:load_swebench",
        "swe-bench-live": "sandlot.tasks.forms:load_live",
        "swe-bench-pro": "sandlot.tasks.forms:load_pro",
        "swe-gym": "sandlot.tasks.forms:load_gym",
        "swe-rebench": "sandlot.tasks.forms:load_rebench",
        "swe-smith": "sandlot.tasks.forms:load_smith",
        "r2e-gym": "sandlot.tasks.forms:load_r2e",
        "nemotron": "sandlot.tasks.forms:load_nemotron",
    },
)
"""Loaders by name; `form:path` as a source picks one. Each takes a path and returns an iterable: of tasks and, in the
place of one that cannot be used, the `TaskError` that says why. What it raises concerns the whole source."""


@dataclass(frozen=True)
class Loaded:
    """The tasks of a source, and why the others were refused."""

    tasks: tuple[Task, ...]
    refused: tuple[TaskError, ...] = ()


def bundled_path() -> Path:
    """The directory of the tasks that ship with Sandlot."""
    return Path(__file__).with_name("bundled")


def load_tasks(source: str | Path, *, skip_bad: bool = False) -> list[Task]:
    """Load every task of `source`, in a fixed order.

    `source` is `bundled`, a task directory (ours or Harbor's), a directory of task directories, a `.jsonl`, `.json` or
    `.parquet` file of rows, a directory that `datasets` saved, a Harbor `registry.json` (with `#NAME@VERSION`, one data
    set of it) or `dataset.toml`, or `form:path` with a loader's name. A task that cannot be used is refused with a
    `TaskError` that names file, row, field and reason, or left out with `skip_bad`; so are two tasks of one id.
    """
    loaded = load_all(source)
    if loaded.refused and not skip_bad:
        raise loaded.refused[0]
    return list(loaded.tasks)


def load_all(source: str | Path) -> Loaded:
    """Load `source` like `load_tasks`, but keep the refusals beside the tasks. Raises when there is neither."""
    form, path = form_and_path(source)
    found: Iterable[Task | TaskError] = LOADERS.get(form)(path)
    tasks: dict[str, Task] = {}
    refused: list[TaskError] = []
    for item in found:
        if isinstance(item, TaskError):
            refused.append(item)
        elif item.id in tasks:
            refused.append(TaskError(f"{path}: the task id {item.id!r} is used twice"))
        else:
            tasks[item.id] = item
    if not tasks and not refused:
        raise TaskError(f"{path}: holds no task")
    return Loaded(tuple(tasks.values()), tuple(refused))


def load_bundled(path: Path) -> list[Task | TaskError]:
    """The tasks that ship with Sandlot: task directories, then the rows of `rows.jsonl`."""
    from sandlot.tasks.directory import load_directory
    from sandlot.tasks.forms import load_rows

    rows = path / "rows.jsonl"
    return [*load_directory(path), *(load_rows(rows) if rows.exists() else [])]


def form_and_path(source: str | Path) -> tuple[str, Path]:
    """The loader's name and the path that `source` means. `TaskError` when there is nothing."""
    text = str(source)
    if text == "bundled":
        return "bundled", bundled_path()
    path = Path(source)
    if path.is_dir():
        return ("dataset" if is_dataset(path) else "directory"), path
    if registry_of(path) or (path.name == "dataset.toml" and path.is_file()):
        return "harbor", path
    if path.is_file() and path.suffix in SUFFIXES:
        return "dataset", path
    name, colon, rest = text.partition(":")
    if colon and name in LOADERS.names():
        if not Path(rest).exists() and not registry_of(Path(rest)):
            raise TaskError(f"{rest}: no such file or directory")
        return name, Path(rest)
    if path.exists():
        raise TaskError(f"{path}: no loader reads this file; give a task directory or one of {', '.join(SUFFIXES)}")
    raise TaskError(f"{path}: no such file or directory; give `bundled`, a task directory or a file of rows")


def registry_of(path: Path) -> tuple[Path, str] | None:
    """The Harbor `registry.json` that is there by this name, and which data set of it is meant, if one:
    `DIRECTORY/registry.json#NAME@VERSION`."""
    if path.name == "registry.json":
        return (path, "") if path.is_file() else None
    file, _, wanted = str(path).rpartition("#")
    return (Path(file), wanted) if Path(file).name == "registry.json" and Path(file).is_file() else None
