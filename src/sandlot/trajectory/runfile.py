"""`run.toml`: the configuration of a run as it is stored, and what differs from it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from sandlot.errors import ConfigError


def read_run_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and facts of the run directory `path`."""
    try:
        with (path / "run.toml").open("rb") as file:
            stored = tomllib.load(file)
        if stored["schema"] != 1:
            raise ConfigError(f"{path} was written by another version of sandlot (schema {stored['schema']})")
        return stored["config"], stored["facts"]
    except (ValueError, KeyError) as e:  # no TOML, or no UTF-8
        raise ConfigError(f"{path / 'run.toml'} cannot be read: {e}") from e


def plain(value: Any, where: str) -> Any:
    """`value` as TOML can hold it; TOML has no null, so what is None is left out."""
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}.{k}") for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{where}[{n}]") for n, v in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, (str, bool, int, float)):
        return value
    raise ConfigError(f"{where} is {value!r}, which run.toml cannot hold")


def first_difference(stored: Mapping[str, Any], now: Mapping[str, Any], may_differ: Collection[str]) -> str:
    """The first dotted key at which two configurations differ, with both values; empty when there is none."""
    before, after = dict(_flat(stored)), dict(_flat(now))
    for key in [*before, *(k for k in after if k not in before)]:
        if any(key == free or key.startswith(f"{free}.") for free in may_differ):
            continue
        old, new = before.get(key), after.get(key)
        if old != new or type(old) is not type(new):
            return f"{key} was {_shown(old)}, is {_shown(new)}"
    return ""


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
