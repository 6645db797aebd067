"""`sandlot grade`: grade again what a run stored, or a patch that is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from sandlot.cli.common import JsonFlag, SandboxOptions, answer, console, print_json, sandbox_options
from sandlot.cli.grading import (
    Countercheck,
    Credit,
    Reruns,
    TestTimeout,
    Weight,
    grade_all,
    grading_flags,
    named,
    with_grading,
)
from sandlot.cli.rollout import ConfigFile
from sandlot.config import GradingConfig, SandboxLimits, load_config
from sandlot.errors import ConfigError
from sandlot.grading import Verdict
from sandlot.rollout.progress import STYLES
from sandlot.sandbox import Limits, SandboxBackend, SandboxSpec, make_backend
from sandlot.tasks import Task, load_tasks
from sandlot.terminal import literal
from sandlot.trajectory.rundir import RunDir


@dataclass(frozen=True)
class Job:
    """A patch to grade: under which name, on which task, and the reward it had before."""

    name: str
    task: Task
    diff: bytes
    before: float | None = None


def command(
    source: Annotated[str, typer.Argument(help="A run directory, or tasks together with --patch.")],
    patch: Annotated[Path | None, typer.Option(help="A patch file to grade on each of the tasks.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="This task only; may be given again.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="Sandbox backend; default: the run's.")] = None,
    sandbox_option: SandboxOptions = None,
    concurrency: Annotated[int, typer.Option("-j", "--concurrency", min=1, help="Gradings at once.")] = 2,
    credit: Credit = None,
    reruns: Reruns = None,
    weight: Weight = None,
    test_timeout: TestTimeout = None,
    countercheck: Countercheck = None,
    config: ConfigFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade the stored patches of a run again and compare, or grade PATCH on tasks. Exit 1 when a verdict changed.

    A run is graded again as it was, with its own settings, except for the flags given.
    """
    flags = {
        "sandbox": sandbox,
        "sandbox_options": sandbox_options(sandbox_option),
        "grading": grading_flags(credit, reruns, weight, test_timeout, countercheck),
    }
    if patch is None:
        if config is not None:
            raise ConfigError("a run is graded with its own settings; --config goes with --patch")
        run = RunDir.read(source)
        grading, limits, backend = _settings_of(run, flags)
        jobs = _stored(run, grading, only)
    else:
        if not patch.is_file():
            raise ConfigError(f"there is no patch file {patch}")
        settings = load_config(config, flags)
        grading, limits = settings.grading, settings.sandbox_limits
        backend = make_backend(settings.sandbox, settings.sandbox_options)
        tasks = named(load_tasks(source), only, source)
        jobs = [Job(task.id, task, patch.read_bytes()) for task in with_grading(tasks, grading)]
    spec = SandboxSpec(limits=limits.over(Limits()))
    verdicts = grade_all([(job.task, job.diff) for job in jobs], backend, concurrency, spec)
    told = list(zip(jobs, verdicts, strict=True))
    if as_json:
        print_json([_row(job, verdict) for job, verdict in told])
    else:
        answer.print(_table("task" if patch else "episode", told))
    if changed := [job.name for job, verdict in told if job.before not in (None, verdict.reward)]:
        names = literal(", ".join(changed))
        said = console if as_json else answer
        said.print(f"[red]{len(changed)} verdicts changed:[/] {names}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _settings_of(run: RunDir, flags: dict[str, Any]) -> tuple[GradingConfig, SandboxLimits, SandboxBackend]:
    """How a run graded, with flags in the place of its settings; another backend gets none of its backend's options."""
    given = {key: value for key, value in flags["grading"].items() if value is not None}
    own = run.config.get("sandbox", "local")
    sandbox = flags["sandbox"] or own
    options = {**(run.config.get("sandbox_options", {}) if sandbox == own else {}), **flags["sandbox_options"]}
    try:
        grading = GradingConfig.model_validate({**run.config.get("grading", {}), **given})
        limits = SandboxLimits.model_validate(run.config.get("sandbox_limits", {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"setting {'.'.join(map(str, first['loc']))!r}: {first['msg'].lower()}") from error
    return grading, limits, make_backend(sandbox, options)


def _stored(run: RunDir, grading: GradingConfig, only: list[str] | None) -> list[Job]:
    source = run.config["tasks"]
    tasks = {task.id: task for task in with_grading(named(load_tasks(source), only, source), grading)}
    jobs = []
    for row in run.results():
        task_id = row["metadata"].get("task")
        path = run.patch_path(row["episode_id"])
        if task_id in tasks and path.exists():
            jobs.append(Job(row["episode_id"], tasks[task_id], path.read_bytes(), row["reward"]))
    if not jobs:
        raise ConfigError(f"{run.path} holds no patch to grade")
    return jobs


def _row(job: Job, verdict: Verdict) -> dict[str, Any]:
    return {"name": job.name, "before": job.before, **asdict(verdict)}


def _table(what: str, told: list[tuple[Job, Verdict]]) -> Table:
    table = Table(what, "before", "now", "tests passed", "detail")
    for job, verdict in told:
        state = "solved" if verdict.solved else "ungraded" if verdict.reward is None else "failed"
        passed = sum(outcome == "passed" for outcome in verdict.tests.values())
        now = f"[{STYLES[state]}]{state if verdict.reward is None else f'{verdict.reward:g}'}[/]"
        before = "" if job.before is None else f"{job.before:g}"
        table.add_row(literal(job.name), before, now, f"{passed}/{len(verdict.tests)}", literal(verdict.detail))
    return table
