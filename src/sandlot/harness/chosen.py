"""A harness as people write it: `NAME`, `NAME:WIRE`, and any `OPTION=VALUE` after them, each behind a colon."""

from __future__ import annotations

from inspect import signature
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sandlot.errors import ConfigError
from sandlot.harness import HARNESSES
from sandlot.harness.base import Harness
from sandlot.harness.layer import Progress

_OURS = ("protocol", "progress")


def chosen(written: str, progress: Progress) -> Harness:
    """The harness that `written` describes. Its options are its constructor's arguments, with their types."""
    name, *parts = written.split(":")
    kind = HARNESSES.get(name)
    takes = signature(kind).parameters
    arguments: dict[str, Any] = {"progress": progress} if "progress" in takes else {}
    for number, part in enumerate(parts):
        option, given, value = part.partition("=")
        if given:
            if option not in takes or option in _OURS:
                known = ", ".join(o for o in takes if o not in _OURS) or "none"
                raise ConfigError(f"{name} has no option {option!r}; its options: {known}")
            kind_of_value = signature(kind, eval_str=True).parameters[option].annotation
            arguments[option] = _typed(kind_of_value, value, f"{name}:{part}")
        elif number:
            raise ConfigError(f"{written!r}: {part!r} is no option; write {name}:WIRE:OPTION=VALUE")
        elif "protocol" in takes:
            arguments["protocol"] = part
        else:
            raise ConfigError(f"{name} speaks one wire only; leave out {part!r}, or write an option as OPTION=VALUE")
    harness: Harness = kind(**arguments)
    return harness


def _typed(kind: Any, value: str, written: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{written}: {error.errors()[0]['msg'].lower()}") from error
