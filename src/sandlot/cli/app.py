"""Puts the commands together, and turns errors meant for people into one sentence and exit status 1."""

from __future__ import annotations

import sys
from importlib import import_module

import typer
from rich.console import Console

from sandlot.errors import SandlotError

app = typer.Typer(
    name="sandlot",
    help="Reinforcement learning of coding agents where they really work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = ("quickstart", "rollout", "gateway", "audit", "export", "view", "grade", "doctor")
GROUPS = ("tasks", "sandbox")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"sandlot {installed('sandlot')}")
        raise typer.Exit


for _name in COMMANDS:
    app.command(_name)(import_module(f"sandlot.cli.{_name}").command)
for _name in GROUPS:
    app.add_typer(import_module(f"sandlot.cli.{_name}").group, name=_name)


def run() -> None:
    """Run the command line. Errors that the user can mend are one line on stderr."""
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
