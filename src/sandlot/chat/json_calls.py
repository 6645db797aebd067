"""Tool calls in the Hermes form: `{"name": …, "arguments": {…}}` between the call markers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from sandlot.chat.markup import Found, Markup, broken_end, found, skip_blanks


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is too large")
    return value


# A raw line break inside a string has one reading only, and models write it; everything else is strict.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)

_DEEPEST = 100
"""Levels of arguments: whoever walks them recursively, as templates and clients do, must not run out of stack."""

_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def read_json_call(text: str, body: int, markup: Markup, reveal: Callable[[str], str], *, truncated: bool) -> Found:
    """Read the call whose body starts at `body`, which holds a `{` after blanks.

    `truncated`: the text was cut, so an object that runs into its end has no end, whatever markers are in it.
    """
    start = skip_blanks(text, body)
    end, cut = object_end(text, start, truncated)
    if end < 0:
        return _broken(text, body, len(text) if cut else start, markup, reveal)
    after = skip_blanks(text, end)
    if text.startswith(markup.call_close, after):
        return read_object(reveal(text[start:end]), after + len(markup.call_close), reveal(text[body:after]))
    if text.startswith(markup.call_open, after):  # a forgotten close: the object is whole, and the next call begins
        return read_object(reveal(text[start:end]), after, reveal(text[body:after]))
    return _broken(text, body, end, markup, reveal)


def object_end(text: str, start: int, truncated: bool) -> tuple[int, bool]:
    """(where the JSON value at `start` ends, -1 when it is none; whether that is since the text was cut in it)."""
    try:
        return _DECODER.raw_decode(text, start)[1], False
    except json.JSONDecodeError as e:
        # The longest piece of JSON that a cut can leave unreadable, besides a string, is `\\uXXX`.
        return -1, truncated and (e.msg.startswith("Unterminated string") or len(text) - e.pos <= len("\\uXXX"))
    except (ValueError, RecursionError):
        return -1, False


def read_object(source: str, end: int, raw: str) -> Found:
    """The call that the JSON object `source` is; it ends at `end`."""
    value = parse_object(source)
    if value is None:
        return guess(source, end, raw)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return found(end, "", raw, raw, "missing_name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        return found(end, name, arguments, raw)
    return guess(source, end, raw)


def _broken(text: str, body: int, after: int, markup: Markup, reveal: Callable[[str], str]) -> Found:
    """A call that is not one whole object; its close marker, where it has one, stands after `after`."""
    close, ambiguous = broken_end(text, after, markup)
    end = close + len(markup.call_close)
    if close < 0:
        raw = reveal(text[body:])
        return found(len(text), written_name(raw), raw, raw, "unclosed")
    raw = reveal(text[body:close])
    return guess(raw.strip(), end, raw, ambiguous)


def guess(source: str, end: int, raw: str, ambiguous: bool = False) -> Found:
    """A call that is no such JSON object: its name where one is written, its arguments as the text they are."""
    name = written_name(source)
    if not name:
        return found(end, "", raw, raw, "missing_name", ambiguous=ambiguous)
    written = _ARGUMENTS.search(source)
    arguments = source[written.end() :].rstrip().removesuffix("}").rstrip() if written else source
    return found(end, name, arguments, raw, "invalid_arguments", ambiguous=ambiguous)


def written_name(source: str) -> str:
    """The name that broken JSON gives for a call, empty where it gives none."""
    written = _NAME.search(source)
    try:
        return str(json.loads(written.group(1), strict=False)) if written else ""
    except ValueError:
        return ""


def parse_object(source: str) -> dict[str, Any] | None:
    """The JSON object in `source`; None where it is none."""
    try:
        value = parse_json(source)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_json(source: str) -> Any:
    """The JSON value in `source`. `ValueError` where it is none, or `is_json` says so."""
    try:
        value = _DECODER.decode(source)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e
    if not is_json(value):
        raise ValueError("no value that can be passed on")
    return value


def is_json(value: Any) -> bool:
    """Whether a value can be written as JSON and walked: no half a character, no infinity, not hundreds of levels."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    level = [value]
    for _ in range(_DEEPEST):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        if not (level := [each for items in inner for each in items if isinstance(each, dict | list)]):
            return True
    return False
