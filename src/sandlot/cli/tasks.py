"""`sandlot tasks`: look at tasks, and prove that they can be trained on."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sandlot.cli.common import (
    JsonFlag,
    SandboxName,
    SandboxOptions,
    answer,
    counted,
    print_json,
    sandbox_options,
    ticking,
)
from sandlot.cli.grading import Countercheck, Credit, Reruns, TestTimeout, Weight, grading_flags, named, with_grading
from sandlot.cli.rollout import ConfigFile
from sandlot.config import load_config
from sandlot.errors import ConfigError, TaskError
from sandlot.grading.cheats import CHEATS
from sandlot.grading.check import Checked, check_tasks
from sandlot.sandbox import SandboxBackend, make_backend
from sandlot.tasks import Task, load_all, load_tasks
from sandlot.tasks.convert import write_rows
from sandlot.tasks.load import form_and_path
from sandlot.terminal import literal, visible

group = typer.Typer(
    help="Look at tasks, and prove that they can be trained on.", no_args_is_help=True, add_completion=False
)
Source = Annotated[
    str, typer.Argument(help="`bundled`, a task directory (ours or Harbor's), a file of rows, or `form:path`.")
]


@group.command("list")
def list_tasks(source: Source = "bundled", as_json: JsonFlag = False) -> None:
    """The tasks of SOURCE."""
    tasks = load_tasks(source)
    if as_json:
        print_json([_facts(task) for task in tasks])
        return
    table = Table("task", "graded by", "image", "statement")
    for task in tasks:
        facts = _facts(task)
        table.add_row(*map(literal, (task.id, facts["grading"], task.image, facts["title"])))
    answer.print(table)


@group.command()
def show(
    task_id: Annotated[str, typer.Argument(help="As `sandlot tasks list` names it.")],
    source: Annotated[str, typer.Option(help="Where it is, as for `list`.")] = "bundled",
    as_json: JsonFlag = False,
) -> None:
    """The statement of one task."""
    for task in load_tasks(source):
        if task.id == task_id:
            if as_json:
                print_json({**_facts(task), "statement": task.statement})
                return
            answer.print(visible(task.statement), markup=False, highlight=False, soft_wrap=True)
            return
    raise ConfigError(f"there is no task called {task_id!r} in {source}; `sandlot tasks list {source}` names them")


@group.command()
def check(
    source: Source = "bundled",
    only: Annotated[list[str] | None, typer.Option("--only", help="This task only; may be given again.")] = None,
    sandbox: SandboxName = None,
    sandbox_option: SandboxOptions = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Gradings at once.")] = 2,
    cheats: Annotated[bool, typer.Option("--cheats/--no-cheats", help="Try the built-in cheats.")] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .jsonl that names the tasks that hold; load it like any source."),
    ] = None,
    credit: Credit = None,
    reruns: Reruns = None,
    weight: Weight = None,
    test_timeout: TestTimeout = None,
    countercheck: Countercheck = None,
    config: ConfigFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove each task: its solution earns 1, twice the same; nothing and cheats earn 0. Exit 1 when one fails."""
    flags = grading_flags(credit, reruns, weight, test_timeout, countercheck)
    settings = load_config(
        config, {"sandbox": sandbox, "sandbox_options": sandbox_options(sandbox_option), "grading": flags}
    )
    loaded = load_all(source)
    tasks = with_grading(named(loaded.tasks, only, source), settings.grading)
    refused = () if only else loaded.refused
    backend = make_backend(settings.sandbox, settings.sandbox_options)
    rows = asyncio.run(_check(tasks, backend, jobs, cheats))
    if out is not None:
        _select(source, [row.task for row in rows if row.ok], out)
    if as_json:
        print_json([row.as_row() for row in rows] + [{"task": None, "ok": False, "faults": [str(e)]} for e in refused])
    else:
        _show_checks(rows, refused)
    if refused or not all(row.ok for row in rows):
        raise typer.Exit(1)


@group.command()
def convert(
    source: Annotated[str, typer.Argument(help="Tasks of any form.")],
    out: Annotated[Path, typer.Argument(help="The .jsonl file to write; repositories and the like go beside it.")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out what cannot be used.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the tasks of SOURCE as rows of one form, which load as the same tasks."""
    if out.suffix != ".jsonl":
        raise ConfigError(f"{out}: rows are written to a .jsonl file")
    tasks = load_tasks(source, skip_bad=skip_bad)
    write_rows(tasks, out)
    if as_json:
        print_json({"file": str(out), "tasks": len(tasks)})
    else:
        answer.print(f"{counted(len(tasks), 'task')} written to {literal(str(out))}", highlight=False, soft_wrap=True)


async def _check(tasks: list[Task], backend: SandboxBackend, jobs: int, cheats: bool) -> list[Checked]:
    count = 0
    try:
        with ticking("checking") as tick:
            tick(0, len(tasks))

            def done(row: Checked) -> None:
                nonlocal count
                count += 1
                tick(count, len(tasks))

            return await check_tasks(tasks, backend, jobs=jobs, cheats=CHEATS if cheats else (), done=done)
    finally:
        await backend.close()


def _show_checks(rows: list[Checked], refused: tuple[TaskError, ...]) -> None:
    table = Table("task", "solution", "again", "nothing", "cheats", "", "why")
    for row in rows:
        shown = ["-" if value is None else f"{value:g}" for value in (row.gold, row.again, row.empty)]
        held = sum(value == 0 for value in row.cheats.values())
        cheats = f"{held}/{len(row.cheats)} earn 0" if row.cheats else "-"
        table.add_row(
            literal(row.task),
            *shown,
            cheats,
            "[green]ok[/]" if row.ok else "[red]no[/]",
            literal("\n".join(row.faults)),
        )
    for error in refused:
        table.add_row("-", "-", "-", "-", "-", "[red]no[/]", literal(str(error)))
    answer.print(table)


def _select(source: str, ids: list[str], out: Path) -> None:
    """Write a selection: the tasks by their source, told from where the file lies, and id."""
    form, path = form_and_path(source)
    place = os.path.relpath(path, out.parent)
    if source == "bundled":
        place = source
    elif source.startswith(f"{form}:"):
        place = f"{form}:{place}"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"source": place, "id": name}) + "\n" for name in ids), encoding="utf-8")


def _facts(task: Task) -> dict[str, str]:
    title = next(line.strip("# ").strip() for line in task.statement.splitlines() if line.strip())
    return {"id": task.id, "grading": type(task.grading).__name__.removesuffix("Grading").lower(), "title": title}
