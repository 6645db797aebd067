"""Find the loader of a task source and load its tasks."""

from __future__ import annotations

from pathlib import Path

from sandlot.errors import TaskError
from sandlot.registry import Registry
from sandlot.tasks.task import Task

LOADERS = Registry(
    "sandlot.tasks",
    {
        "bundled": "sandlot.tasks.load:load_bundled",
        "directory": "sandlot.tasks.directory:load_directory",
        "jsonl": "sandlot.tasks.rows:load_jsonl",
    },
)
"""Loaders by name; each takes a path and returns a list of tasks. `form:path` as a source picks one by its name."""


def bundled_path() -> Path:
    """The directory of the tasks that ship with Sandlot."""
    return Path(__file__).with_name("bundled")


def load_tasks(source: str | Path) -> list[Task]:
    """Load every task of `source`, in a fixed order.

    `source` is `bundled`, a task directory (it holds a `task.toml`), a directory of task directories, a `.jsonl` file
    of coding-agent rows, or `form:path` with a loader's name. A task that cannot be used is refused with a `TaskError`
    that names file, row, field and reason; so are two tasks of one id.
    """
    form, path = _form(source)
    tasks: list[Task] = LOADERS.get(form)(path)
    if not tasks:
        raise TaskError(f"{path}: holds no task")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskError(f"{path}: the task id {task.id!r} is used twice")
        seen.add(task.id)
    return tasks


def load_bundled(path: Path) -> list[Task]:
    """The tasks that ship with Sandlot: task directories, then the rows of `rows.jsonl`."""
    from sandlot.tasks.directory import load_directory
    from sandlot.tasks.rows import load_jsonl

    rows = path / "rows.jsonl"
    return [*load_directory(path), *(load_jsonl(rows) if rows.exists() else [])]


def _form(source: str | Path) -> tuple[str, Path]:
    text = str(source)
    if text == "bundled":
        return "bundled", bundled_path()
    path = Path(source)
    if path.is_dir():
        return "directory", path
    if path.suffix == ".jsonl" and path.is_file():
        return "jsonl", path
    name, colon, rest = text.partition(":")
    if colon and name in LOADERS.names():
        return name, Path(rest)
    if path.exists():
        raise TaskError(f"{path}: no loader reads this file; give a task directory or a .jsonl file")
    raise TaskError(f"{path}: no such file or directory; give `bundled`, a task directory or a .jsonl file")
