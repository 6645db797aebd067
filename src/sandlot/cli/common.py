"""What commands share: consoles, JSON output, options of a run and of a sandbox backend."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from sandlot.errors import ConfigError

if TYPE_CHECKING:
    from sandlot.sandbox import SandboxBackend

console = Console(stderr=True, emoji=False)
"""Progress and remarks, on stderr."""
answer = Console(emoji=False)
"""What a command was asked for, on stdout."""
for _one in (console, answer):
    if not _one.is_terminal and "COLUMNS" not in os.environ:
        _one.width = 120  # a file has no width of its own

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of tables.")]
SandboxName = Annotated[str | None, typer.Option("--sandbox", help="Sandbox backend.", show_default="local")]
SandboxOptions = Annotated[
    list[str] | None,
    typer.Option("--sandbox-option", help="NAME=VALUE of the backend's own options; may be given again."),
]
RunArgument = Annotated[Path, typer.Argument(help="A run directory.", show_default=False)]


@contextmanager
def ticking(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that is told (done, of)."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def sandbox_options(written: list[str] | None) -> dict[str, str]:
    """The `sandbox_options` settings that flags give, as text."""
    options = {}
    for text in written or ():
        name, given, value = text.partition("=")
        if not (name and given):
            raise ConfigError(f"--sandbox-option {text!r} is not NAME=VALUE")
        options[name] = value
    return options


def chosen_backend(sandbox: str | None, options: list[str] | None) -> SandboxBackend:
    """The backend that flags and variables name, made with their options."""
    from sandlot.config import load_config
    from sandlot.sandbox import make_backend

    settings = load_config(flags={"sandbox": sandbox, "sandbox_options": sandbox_options(options)})
    return make_backend(settings.sandbox, settings.sandbox_options)


def counted(count: int, one: str, several: str = "") -> str:
    """A number of things in words."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    unicode = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    json.dump(value, sys.stdout, indent=2, ensure_ascii=not unicode, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()  # a command that goes on, as the gateway does, is heard at once
