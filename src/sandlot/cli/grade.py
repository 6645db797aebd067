"""`sandlot grade`: grade again what a run stored, or a patch that is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sandlot.cli.common import JsonFlag, console, grade_all, print_json
from sandlot.errors import ConfigError
from sandlot.grading import Verdict
from sandlot.rollout.progress import STYLES
from sandlot.tasks import Task, load_tasks
from sandlot.trajectory.rundir import RunDir


def command(
    source: Annotated[str, typer.Argument(help="A run directory, or tasks together with --patch.")],
    patch: Annotated[Path | None, typer.Option(help="A patch file to grade on each of the tasks.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="This task only; may be given again.")] = None,
    sandbox: Annotated[str, typer.Option(help="Sandbox backend.")] = "local",
    concurrency: Annotated[int, typer.Option("-j", min=1, help="Gradings at once.")] = 2,
    as_json: JsonFlag = False,
) -> None:
    """Grade the stored patches of a run again and compare, or grade PATCH on tasks. Exit 1 when a verdict changed."""
    jobs: list[tuple[str, Task, bytes, float | None]]
    if patch is not None:
        if not patch.is_file():
            raise ConfigError(f"there is no patch file {patch}")
        tasks = [t for t in load_tasks(source) if not only or t.id in only]
        jobs = [(task.id, task, patch.read_bytes(), None) for task in tasks]
    else:
        jobs = list(_stored(RunDir.read(source), only))
    verdicts = grade_all([(task, diff) for _, task, diff, _ in jobs], sandbox, concurrency)
    changed = [name for (name, _, _, before), v in zip(jobs, verdicts, strict=True) if _changed(before, v)]
    if as_json:
        print_json(
            [
                {"name": name, "before": before, "reward": v.reward, "failure": v.failure, "detail": v.detail}
                for (name, _, _, before), v in zip(jobs, verdicts, strict=True)
            ]
        )
    else:
        table = Table("episode" if patch is None else "task", "before", "now", "tests passed", "detail")
        for (name, _, _, before), v in zip(jobs, verdicts, strict=True):
            state = "solved" if v.solved else "ungraded" if v.reward is None else "failed"
            passed = sum(s == "passed" for s in v.tests.values())
            now = f"[{STYLES[state]}]{state if v.reward is None else f'{v.reward:g}'}[/]"
            table.add_row(name, "" if before is None else f"{before:g}", now, f"{passed}/{len(v.tests)}", v.detail)
        console.print(table)
    if changed:
        console.print(f"[red]{len(changed)} verdicts changed:[/] {', '.join(changed)}", highlight=False)
        raise typer.Exit(1)


def _changed(before: float | None, verdict: Verdict) -> bool:
    return before is not None and verdict.reward != before


def _stored(run: RunDir, only: list[str] | None) -> list[tuple[str, Task, bytes, float | None]]:
    tasks = {task.id: task for task in load_tasks(run.config["tasks"])}
    jobs = []
    for row in run.results():
        task_id = row["metadata"].get("task")
        path = run.patch_path(row["episode_id"])
        if task_id in tasks and path.exists() and (not only or task_id in only):
            jobs.append((row["episode_id"], tasks[task_id], path.read_bytes(), row["reward"]))
    if not jobs:
        raise ConfigError(f"{run.path} holds no patch to grade")
    return jobs
