"""What a backend is made with, as people write it: the named arguments of its constructor, with their types."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from sandlot.errors import ConfigError


def checked(name: str, kind: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the backend `name`, each of the type that `kind` wants; text is read as that type."""
    from pydantic import TypeAdapter, ValidationError

    known, open_ended = known_options(kind)
    options: dict[str, Any] = {}
    for option, value in written.items():
        if option not in known and not open_ended:
            names = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"the sandbox backend {name} has no option {option!r}; its options: {names}")
        wanted = TypeAdapter(known.get(option, Any))
        try:
            options[option] = wanted.validate_python(value)
        except ValidationError as error:
            try:  # variables and flags are text, in which tables and lists are JSON
                options[option] = wanted.validate_json(value)
            except (ValidationError, TypeError):
                raise ConfigError(
                    f"the sandbox backend {name} cannot take {value!r} for its option {option!r}: "
                    f"{error.errors()[0]['msg'].lower()}"
                ) from error
    return options


def known_options(kind: Any) -> tuple[dict[str, Any], bool]:
    """The options that can be written, with their types, and whether others are passed on to what we cannot see.

    A constructor that passes `**options` on has those of the class above it, too. What is `Any` is an object of an SDK,
    which only a program can give.
    """
    known: dict[str, Any] = {}
    if isinstance(kind, type):
        makers, given = [vars(one)["__init__"] for one in kind.__mro__[:-1] if "__init__" in vars(one)], 1
    else:
        makers, given = [kind], 0
    for maker in makers:
        parameters = list(signature(maker, eval_str=True).parameters.values())
        for one in parameters[given:]:
            if one.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD) and one.annotation is not Any:
                known.setdefault(one.name, Any if one.annotation is Parameter.empty else one.annotation)
        if not any(one.kind is Parameter.VAR_KEYWORD for one in parameters):
            return known, False
    return known, bool(makers)
