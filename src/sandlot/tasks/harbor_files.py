"""Which files of a Harbor task directory count, and their digest: what Harbor's own packager says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from pathspec import GitIgnoreSpec, PathSpec

from sandlot.errors import TaskError

_RULES = ".harborignore"
_SCOPES = ("tests", "solution")
"""Only below these are there rules."""
_SINGLE = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_TREES = ("environment", "tests", "solution", "steps")
_LEFT_OUT = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
"""What the digest leaves out where the task has no `.gitignore`."""


class TaskFiles:
    """The files of one task directory."""

    def __init__(self, task: Path) -> None:
        self.task = task.resolve()
        self._rules: dict[Path, GitIgnoreSpec] = {}

    def ignored(self, path: Path) -> bool:
        """Whether `.harborignore` files leave out a path of the task, or what a link there leads to."""
        path = Path(os.path.abspath(path))
        if not path.is_relative_to(self.task):
            return False
        target = path.resolve()
        return self._named(path) or (target != path and target.is_relative_to(self.task) and self._named(target))

    def _named(self, path: Path) -> bool:
        inner = path.relative_to(self.task)
        if inner.name == _RULES:
            return True
        if inner.parts[:1] not in [(scope,) for scope in _SCOPES]:
            return False
        above: list[Path] = []
        place = self.task
        for part in inner.parts:
            place = place / part
            end = "/" if place != path or path.is_dir() else ""
            verdicts = [self._rules_of(d).check_file(place.relative_to(d).as_posix() + end).include for d in above]
            if [verdict for verdict in verdicts if verdict is not None][-1:] == [True]:
                return True
            above.append(place)
        return False

    def _rules_of(self, directory: Path) -> GitIgnoreSpec:
        if directory not in self._rules:
            file = directory / _RULES
            try:
                there = file.is_file() and file.resolve().is_relative_to(self.task)
                lines = file.read_text().splitlines() if there else []
                self._rules[directory] = GitIgnoreSpec.from_lines(lines)
            except (OSError, ValueError) as error:
                raise TaskError(f"{file}: cannot be read: {error}") from None
        return self._rules[directory]

    @cached_property
    def digest(self) -> str:
        """`sha256:…` of the names and contents of what would be published."""
        outer = hashlib.sha256()
        for path in sorted(self._published(), key=lambda path: path.relative_to(self.task).as_posix()):
            name = path.relative_to(self.task).as_posix()
            with path.open("rb") as file:
                outer.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return f"sha256:{outer.hexdigest()}"

    def _published(self) -> Iterator[Path]:
        own = self.task / ".gitignore"
        left_out = PathSpec.from_lines("gitignore", own.read_text().splitlines() if own.exists() else _LEFT_OUT)
        found = [self.task / name for name in _SINGLE]
        for tree in _TREES:
            found += self._below(self.task / tree)
        for path in found:
            if path.is_file() and not left_out.match_file(path.relative_to(self.task).as_posix()):
                yield path

    def _below(self, directory: Path) -> Iterator[Path]:
        if not directory.is_dir() or self.ignored(directory):
            return
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                yield from self._below(path)
            elif not self.ignored(path):
                yield path
