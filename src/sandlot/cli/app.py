"""Puts the commands together, and turns errors meant for people into one sentence and exit status 1."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from sandlot.cache import cache_dir
from sandlot.errors import SandlotError
from sandlot.terminal import literal

COMMANDS = ("quickstart", "rollout", "gateway", "replay", "audit", "export", "view", "grade", "doctor")
GROUPS = ("tasks", "sandbox")


class _Commands(TyperGroup):
    """Imports a command's file when it is asked for, so that each starts with what it needs and no more."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *GROUPS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in (*COMMANDS, *GROUPS):
            return None
        module = import_module(f"sandlot.cli.{cmd_name}")
        if cmd_name in GROUPS:
            command = typer.main.get_command(module.group)
        else:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(module.command)
            command = typer.main.get_command(alone)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="sandlot",
    cls=_Commands,
    help="Reinforcement learning of coding agents where they really work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"sandlot {installed('sandlot')}")
        raise typer.Exit


def run() -> None:
    """Run the command line. Errors that the user can mend are one line on stderr."""
    # Whoever is asked to end cleans up as if interrupted.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot write, as stderr does
    try:
        app()
    except SandlotError as error:
        _fail(str(error))
    except OSError as error:
        if not (said := told_of(error)):
            raise
        _fail(said)


def told_of(error: OSError) -> str:
    """What the system refused, for people, where it is a file or the disk; else nothing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'a disk'}: {error.strerror}; free some space, then give the same command again"
    if error.filename is None:
        return ""
    path = Path(os.fsdecode(error.filename))
    cure = "give another path, or mend this one"
    if cache_dir().is_relative_to(path) or path.is_relative_to(cache_dir()):
        cure = "set XDG_CACHE_HOME to a directory that you may write to"
    return f"{path}: {error.strerror}; {cure}"


def _fail(what: str) -> None:
    Console(stderr=True, emoji=False).print(f"[bold red]error:[/] {literal(what)}", soft_wrap=True, highlight=False)
    sys.exit(1)
