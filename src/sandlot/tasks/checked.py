"""Checks that loaders share."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from sandlot.errors import TaskError
from sandlot.tasks.task import GradingOptions


def check_workdir(value: str) -> str:
    """`value` when it can be a workdir; `ValueError` with the reason otherwise."""
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/"):
        raise ValueError("must be an absolute path below / without '..'")
    return value


def explain(error: ValidationError) -> str:
    """All faults of a validation error as `field: reason`, joined."""
    faults = []
    for fault in error.errors():
        field = ".".join(str(part) for part in fault["loc"])
        faults.append(f"{field}: {fault['msg'].removeprefix('Value error, ')}" if field else str(fault["msg"]))
    return "; ".join(faults)


def inside(root: Path, relative: str, field: str, where: str) -> Path:
    """The path `relative` below `root`, refused when it is missing or leads out."""
    path = root / relative
    try:
        out = Path(relative).is_absolute() or not path.resolve().is_relative_to(root.resolve())
        there = out or path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, or a ring of links
        raise TaskError(f"{where}: {field}: {relative[:200]!r} is no path") from None
    if out:
        raise TaskError(f"{where}: {field}: {relative!r} leads out of {root}")
    if not there:
        raise TaskError(f"{where}: {field}: {relative!r} does not exist in {root}")
    return path


def own(file: Path, root: Path) -> Path:
    """`file`, refused where a link leads out of `root`: what it stands for would be told to an agent."""
    try:
        if file.resolve().is_relative_to(root.resolve()):
            return file
    except (OSError, RuntimeError):
        pass  # a ring of links
    raise TaskError(f"{file}: is a link that leads out of {root}")


def task_directories(path: Path) -> list[Path]:
    """`path` if it holds a `task.toml`, else its directories that do, by name."""
    if (path / "task.toml").is_file():
        return [path]
    return [file.parent for file in sorted(path.glob("*/task.toml"))]


def read_toml(file: Path) -> dict[str, Any]:
    """The content of a task file."""
    try:
        return tomllib.loads(own(file, file.parent).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{file}: not readable as TOML: {error}") from None


def read_statement(file: Path) -> str:
    """The text of a file that must say something."""
    try:
        text = own(file, file.parent).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TaskError(f"{file}: the {file.stem} cannot be read: {error}") from None
    if not text.strip():
        raise TaskError(f"{file}: the {file.stem} is empty")
    return text


def files_below(root: Path) -> dict[Path, bytes]:
    """The files below a directory by their paths, caches left out. A link stands for the file below `root` that it
    leads to; one that leads elsewhere is refused, since the tests would lack what it stands for."""
    files = {}
    for path in sorted(root.rglob("*")):
        if "__pycache__" in path.parts or (path.is_dir() and not path.is_symlink()):
            continue
        try:
            if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
                raise TaskError(f"{path}: is no file, nor a link to one of {root}")
            files[path] = path.read_bytes()
        except (OSError, RuntimeError) as error:
            raise TaskError(f"{path}: cannot be read: {error}") from None
    return files


def checked_options(value: Mapping[str, Any]) -> GradingOptions:
    """Grading options from an object; `ValueError` with the reason for what is none."""
    known = [option.name for option in fields(GradingOptions)]
    if unknown := sorted(set(value) - set(known)):
        raise ValueError(f"{unknown[0]!r} is no option; there are {', '.join(known)}")
    if value.get("credit", "all") not in ("all", "fraction"):
        raise ValueError("credit must be 'all' or 'fraction'")
    reruns = value.get("reruns", 0)
    if isinstance(reruns, bool) or not isinstance(reruns, int) or not 0 <= reruns <= 10:
        raise ValueError("reruns must be a whole number from 0 to 10")
    weights = value.get("weights") or {}
    if not isinstance(weights, Mapping) or not all(_is_number(w) and 0 <= w < float("inf") for w in weights.values()):
        raise ValueError("weights must map names to numbers that are not negative")
    if weights and not sum(weights.values()) > 0:
        raise ValueError("the weights must not all be 0")
    timeout = value.get("timeout")
    if timeout is not None and not (_is_number(timeout) and 0 < timeout < float("inf")):
        raise ValueError("timeout must be a number of seconds above 0")
    countercheck = value.get("countercheck", True)
    if not isinstance(countercheck, bool):
        raise ValueError("countercheck must be true or false")
    return GradingOptions(value.get("credit", "all"), reruns, dict(weights), timeout, countercheck)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
