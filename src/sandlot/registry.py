"""Name → implementation tables for harnesses, sandboxes, graders and engines.

A built-in is one line `"name": "module:attribute"` in its room; an outside package adds its own by an entry
point. Nothing is imported until it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from sandlot.errors import ConfigError


class Registry:
    """Lazily imported implementations of one kind, by name."""

    def __init__(self, group: str, builtin: Mapping[str, str]) -> None:
        self.group = group
        self._builtin = dict(builtin)

    def names(self) -> list[str]:
        """All known names, the built-in ones first."""
        outside = {e.name for e in entry_points(group=self.group)}
        return [*self._builtin, *sorted(outside - set(self._builtin))]

    def get(self, name: str) -> Any:
        """Import and return the implementation called `name`; `ConfigError` when nobody offers it."""
        if target := self._builtin.get(name):
            module, _, attribute = target.partition(":")
            return getattr(import_module(module), attribute)
        for entry in entry_points(group=self.group):
            if entry.name == name:
                return entry.load()
        raise ConfigError(f"no {self.group} called {name!r}; there are: {', '.join(self.names())}")
