"""What commands share: consoles, JSON output, options of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

console = Console(stderr=True)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 120  # a log file has no width of its own
"""For people. What a script reads goes to stdout."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of tables.")]
RunArgument = Annotated[Path, typer.Argument(help="A run directory.", show_default=False)]


@contextmanager
def ticking(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that is told (done, of)."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")
