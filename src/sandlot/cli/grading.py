"""What the commands that grade share: how results become a reward, and where patches are graded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandlot.cli.common import ticking
from sandlot.config import GradingConfig
from sandlot.errors import ConfigError

if TYPE_CHECKING:
    from sandlot.grading import Verdict
    from sandlot.sandbox import SandboxBackend, SandboxSpec
    from sandlot.tasks import Task

Credit = Annotated[str | None, typer.Option(help="`all`, or `fraction` of the tests that must begin to pass.")]
Reruns = Annotated[int | None, typer.Option(help="How often an unsolved verdict is graded again.")]
Weight = Annotated[
    list[str] | None, typer.Option("--weight", help="NAME=NUMBER of a verifier's rewards; may be given again.")
]
TestTimeout = Annotated[float | None, typer.Option("--test-timeout", help="Seconds that the tests may take.")]
Countercheck = Annotated[
    bool | None,
    typer.Option("--countercheck/--no-countercheck", help="Grade what earns something by inverted tests too."),
]


def grading_flags(
    credit: str | None, reruns: int | None, weight: list[str] | None, timeout: float | None, countercheck: bool | None
) -> dict[str, Any]:
    """The `grading` settings that flags give; None where a flag was not given."""
    weights = {}
    for text in weight or ():
        name, _, number = text.partition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            raise ConfigError(f"--weight {text!r} is not NAME=NUMBER") from None
    return {
        "credit": credit,
        "reruns": reruns,
        "weights": weights or None,
        "timeout": timeout,
        "countercheck": countercheck,
    }


def named(tasks: Sequence[Task], only: Sequence[str] | None, source: str) -> list[Task]:
    """Those of the tasks that `only` names, all where it names none."""
    if unknown := sorted(set(only or ()) - {task.id for task in tasks}):
        raise ConfigError(
            f"there is no task called {unknown[0]!r} in {source}; `sandlot tasks list {source}` names them"
        )
    return [task for task in tasks if not only or task.id in only]


def with_grading(tasks: Sequence[Task], grading: GradingConfig) -> list[Task]:
    """The tasks, graded as `grading` says where it says something."""
    return [replace(task, options=grading.over(task.options)) for task in tasks]


def grade_all(
    jobs: Sequence[tuple[Task, bytes]], backend: SandboxBackend, concurrency: int, spec: SandboxSpec | None = None
) -> list[Verdict]:
    """Grade patches on tasks, some at once, behind a progress bar, and close `backend`. `spec` gives the limits."""
    return asyncio.run(_grade_all(jobs, backend, concurrency, spec))


async def _grade_all(
    jobs: Sequence[tuple[Task, bytes]], backend: SandboxBackend, concurrency: int, spec: SandboxSpec | None
) -> list[Verdict]:
    from sandlot.grading import grade

    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def one(task: Task, diff: bytes, tick: Callable[[int, int], None]) -> Verdict:
        nonlocal done
        async with slots:
            verdict = await grade(task, diff, backend, spec=spec)
        done += 1
        tick(done, len(jobs))
        return verdict

    try:
        with ticking("grading") as tick:
            return list(await asyncio.gather(*(one(task, diff, tick) for task, diff in jobs)))
    finally:
        await backend.close()
