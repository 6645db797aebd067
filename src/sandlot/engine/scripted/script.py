"""The script file: which turns the scripted policy writes for which task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sandlot.errors import ConfigError


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call. `tool` is matched with the tools offered in the prompt without regard to case."""

    tool: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, Any] = {}


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    """What the policy writes in one turn."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = []


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """The turns of one task, which is recognised by `match` standing in the prompt."""

    match: Annotated[str, Meta(min_length=1)]
    steps: list[Step]


class Scripts(Struct, frozen=True, forbid_unknown_fields=True):
    """A script file. `fallback` is written after the last step, and where no script matches."""

    scripts: list[Script]
    fallback: Step = Step(text="Done.")

    def find(self, text: str) -> Script | None:
        """The script whose `match` occurs in `text`; the longest one if there are several."""
        found = [s for s in self.scripts if s.match in text]
        return max(found, key=lambda s: len(s.match), default=None)


def read_scripts(path: Path) -> Scripts:
    """Read and validate a script file; `ConfigError` names the place of the mistake."""
    try:
        scripts = msgspec.json.decode(path.read_bytes(), type=Scripts)
    except OSError as e:
        raise ConfigError(f"the script file {path} cannot be read: {e.strerror}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"the script file {path} is not valid: {e}") from e
    if scripts.fallback.calls:
        raise ConfigError(f"the script file {path} is not valid: the fallback ends an episode, so it cannot call tools")
    matches = [s.match for s in scripts.scripts]
    if twice := next((m for m in matches if matches.count(m) > 1), None):
        raise ConfigError(f"the script file {path} is not valid: two scripts match {twice!r}")
    return scripts
