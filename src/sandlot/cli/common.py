"""What commands share: consoles, JSON output, options of a run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from sandlot.grading import Verdict
    from sandlot.tasks import Task

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


def grade_all(jobs: Sequence[tuple[Task, bytes]], sandbox: str, concurrency: int) -> list[Verdict]:
    """Grade patches on tasks, some at once, behind a progress bar."""
    return asyncio.run(_grade_all(jobs, sandbox, concurrency))


async def _grade_all(jobs: Sequence[tuple[Task, bytes]], sandbox: str, concurrency: int) -> list[Verdict]:
    from sandlot.grading import grade
    from sandlot.sandbox import SANDBOXES

    backend = SANDBOXES.get(sandbox)()
    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def one(task: Task, diff: bytes, tick: Callable[[int, int], None]) -> Verdict:
        nonlocal done
        async with slots:
            verdict = await grade(task, diff, backend)
        done += 1
        tick(done, len(jobs))
        return verdict

    try:
        with ticking("grading") as tick:
            return list(await asyncio.gather(*(one(task, diff, tick) for task, diff in jobs)))
    finally:
        await backend.close()


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")
