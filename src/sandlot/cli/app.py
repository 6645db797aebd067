"""Puts the commands together, and turns errors meant for people into one sentence and exit status 1."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from sandlot.errors import SandlotError

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
    try:
        app()
    except SandlotError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command again continues")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
