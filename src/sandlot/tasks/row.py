"""One row of a dataset with typed access to its fields; every refusal names file, row and field."""

from __future__ import annotations

import ast
import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sandlot.errors import TaskError
from sandlot.tasks.checked import check_workdir, checked_options, inside
from sandlot.tasks.task import GradingOptions, Repository, TaskLimits

Fields = Mapping[str, Any]
_MOST_SECONDS = 1e9


def _list_of(text: str) -> Any:
    """A list written as JSON, or as Python writes it (some data sets do); None for other text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


class Row:
    """A row and where it stands. `key` names a field, with what is above it where it lies deeper."""

    def __init__(self, path: Path, number: int, row: Fields) -> None:
        self.path = path
        self.number = number
        self.where = f"{path}: row {number}"
        self.row = row

    def error(self, field: str, reason: str) -> TaskError:
        return TaskError(f"{self.where}: {field}: {reason}")

    def text(self, source: Fields, key: str, field: str = "") -> str:
        """The string at `key`, empty when absent or null."""
        value = source.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.error(field or key, f"must be a string, not {type(value).__name__}")
        return self._encodable(value, field or key)

    def _encodable(self, value: str, field: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(field, "holds half of a character (a lone surrogate)") from None
        return value

    def needed(self, source: Fields, key: str, field: str = "") -> str:
        """The string at `key`, which must say something."""
        if not (value := self.text(source, key, field)).strip():
            raise self.error(field or key, "is missing")
        return value

    def strings(self, source: Fields, field: str, *keys: str) -> tuple[str, ...]:
        """The list of strings at the first of `keys` that is there; lists written as JSON text are read too."""
        prefix = f"{field}." if field else ""
        for key in keys:
            value = source.get(key)
            if value is None:
                continue
            if isinstance(value, str):
                value = _list_of(value)
                if value is None:
                    raise self.error(f"{prefix}{key}", "is text, but no JSON list")
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.error(f"{prefix}{key}", "must be a list of strings")
            return tuple(self._encodable(item, f"{prefix}{key}") for item in value)
        return ()

    def tests(self, source: Fields, field: str, *keys: str) -> tuple[str, ...]:
        """The names of tests at the first of `keys` that is there; none may be blank."""
        names = self.strings(source, field, *keys)
        if not all(name.strip() for name in names):
            raise self.error(f"{field}.{keys[0]}" if field else keys[0], "has a blank name")
        return names

    def beside(self, name: str, field: str) -> str:
        """The text of a file; a relative one lies beside the rows."""
        try:
            return (self.path.parent / name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            place = str(self.path.parent / name)[:300]
            raise self.error(field, f"is no text of the row, and {place!r} cannot be read: {reason}") from None

    def object(self, source: Fields, key: str, field: str = "") -> Fields:
        """The object at `key`, which may be written as JSON text; empty when absent or null."""
        value = source.get(key)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.error(field or key, "is text, but no JSON object") from None
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(field or key, "must be an object")
        return value

    def files(self, source: Fields, field: str, key: str = "files") -> dict[str, bytes]:
        """Hidden files: path to text, or to `{"base64": …}` for bytes."""
        value = source.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.error(field, "must map paths to text")
        return {name: self.content(content, f"{field}.{name}") for name, content in self._paths(value, field)}

    def _paths(self, value: Fields, field: str) -> list[tuple[str, Any]]:
        for name in value:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
                raise self.error(field, f"{name!r} leads out of the workdir")
        return list(value.items())

    def content(self, value: Any, field: str) -> bytes:
        """Bytes written as text or as `{"base64": …}`."""
        if isinstance(value, str):
            return self._encodable(value, field).encode()
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (TypeError, KeyError, ValueError, binascii.Error):
            raise self.error(field, 'must be text or {"base64": text}') from None

    def seconds(self, source: Fields, field: str, default: float) -> float:
        value = source.get("timeout")
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_SECONDS:
            raise self.error(field, "must be a positive number of seconds, a billion at most")
        return float(value)

    def workdir(self, value: str, field: str = "workdir") -> str:
        try:
            return check_workdir(value)
        except ValueError as error:
            raise self.error(field, str(error)) from None

    def limits(self, source: Fields, field: str = "limits") -> TaskLimits:
        value = self.object(source, "limits", field)
        for key, number in value.items():
            if key not in ("wall_clock", "turns", "tokens"):
                raise self.error(f"{field}.{key}", "is no limit; there are wall_clock, turns and tokens")
            whole = isinstance(number, int) or (key == "wall_clock" and isinstance(number, float))
            if isinstance(number, bool) or not whole or not 0 < number < float("inf"):
                raise self.error(f"{field}.{key}", "must be a positive number")
        return TaskLimits(**value)

    def options(self, source: Fields, field: str = "options") -> GradingOptions:
        value = self.object(source, "options", field)
        try:
            return checked_options(value)
        except ValueError as error:
            raise self.error(field, str(error)) from None

    def repository(self, source: Fields, field: str = "repository", base: str = "") -> Repository | None:
        """A repository beside the file: `{"fast_export" | "directory", "base"}`."""
        value = source.get("repository")
        if value is None:
            return None
        if not isinstance(value, Mapping) or not value.keys() <= {"fast_export", "directory", "base"}:
            raise self.error(field, "must be an object with fast_export or directory, and base")
        sources = [key for key in ("fast_export", "directory") if value.get(key) is not None]
        if len(sources) != 1:
            raise self.error(field, "must name exactly one of fast_export and directory")
        name = self.text(value, sources[0], f"{field}.{sources[0]}")
        path = inside(self.path.parent, name, f"{field}.{sources[0]}", self.where)
        base = self.text(value, "base", f"{field}.base") or base or "HEAD"
        return Repository(directory=path, base=base) if sources[0] == "directory" else Repository(path, base=base)
