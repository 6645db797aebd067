"""What a patch may not decide: the tests, and how they are run."""

from __future__ import annotations

import configparser
import tomllib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from sandlot.workspace.git import Change

_RUNNER_FILES = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "sitecustomize.py", "usercustomize.py",
    "*.pth", "*.egg-link", "pyvenv.cfg",
)  # fmt: skip
_RUNNER_DIRECTORIES = ("*.egg-info", "*.dist-info", "__pycache__")
_RUNNER_MODULES = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "sandlot_witness"})
_TEST_DIRECTORIES = frozenset({"test", "tests"})


def test_roots(paths: Iterable[str]) -> set[str]:
    """The topmost directory called `tests` or `test` above each of the hidden tests' paths, where there is one."""
    roots = set()
    for path in paths:
        parts = PurePosixPath(path).parts[:-1]
        for depth, part in enumerate(parts):
            if part in _TEST_DIRECTORIES:
                roots.add("/".join(parts[: depth + 1]))
                break
    return roots


test_roots.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name


def reverted(
    changes: Iterable[Change],
    *,
    hidden: Iterable[str],
    patterns: Iterable[str],
    contents: Callable[[Change], tuple[bytes | None, bytes | None]],
) -> list[Change]:
    """The changes of a patch that are taken back before the hidden tests are put in.

    These are: the hidden tests' own paths, what takes the place of a directory above them, everything in the test
    directories they lie in, paths that fit the task's `patterns`, and whatever configures the test runner: its files
    anywhere, modules that would be imported in its place, and files whose pytest section changed. `contents` gives a
    change's old and new content.
    """
    hidden = list(hidden)
    patterns = list(patterns)
    roots = test_roots(hidden)
    exact = {*hidden, *roots, *(str(parent) for path in hidden for parent in PurePosixPath(path).parents)}
    found = []
    for change in changes:
        path = change.path.decode("utf-8", "surrogateescape")
        if (
            path in exact
            or any(path.startswith(f"{root}/") for root in roots)
            or any(_fits(path, pattern) for pattern in patterns)
            or _configures_runner(path, added=change.old is None)
            or (_may_hold_a_section(path) and _section_changed(path, *contents(change)))
        ):
            found.append(change)
    return found


def _fits(path: str, pattern: str) -> bool:
    """A shell pattern over the whole path; without a slash it fits base names, with one at its end a directory."""
    if pattern.endswith("/"):
        return path.startswith(pattern) or f"/{pattern}" in path
    return fnmatchcase(path, pattern) or ("/" not in pattern and fnmatchcase(path.rpartition("/")[2], pattern))


def _configures_runner(path: str, *, added: bool) -> bool:
    parts = PurePosixPath(path).parts
    if any(fnmatchcase(parts[-1], pattern) for pattern in _RUNNER_FILES):
        return True
    if fnmatchcase("/".join(parts[-2:]), "bin/python*"):
        return True
    if any(fnmatchcase(part, pattern) for part in parts for pattern in _RUNNER_DIRECTORIES):
        return True
    return added and any(part.partition(".")[0] in _RUNNER_MODULES for part in parts)


def _may_hold_a_section(path: str) -> bool:
    return path.rpartition("/")[2] in ("pyproject.toml", "setup.cfg", "tox.ini")


def _section_changed(path: str, old: bytes | None, new: bytes | None) -> bool:
    """Whether the part of a file that pytest reads differs; a file that cannot be read counts as changed."""
    try:
        return _section(path, old) != _section(path, new)
    except (ValueError, RecursionError, configparser.Error):
        return True


def _section(path: str, content: bytes | None) -> object:
    if content is None:
        return None
    text = content.decode()
    if path.endswith(".toml"):
        tool = tomllib.loads(text).get("tool")
        return tool.get("pytest") if isinstance(tool, dict) else None
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    for name in ("pytest", "tool:pytest"):
        if parser.has_section(name):
            return dict(parser.items(name))
    return None
