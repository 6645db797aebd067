"""`sandlot tasks`: look at tasks, and prove that they can be trained on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from sandlot.cli.common import JsonFlag, console, grade_all, print_json
from sandlot.errors import ConfigError
from sandlot.tasks import Task, load_tasks

group = typer.Typer(help="Look at tasks, and prove that they can be trained on.", no_args_is_help=True)
Source = Annotated[str, typer.Argument(help="`bundled`, a task directory, or a .jsonl of rows.")]


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
        table.add_row(task.id, facts["grading"], task.image, facts["title"])
    console.print(table)


@group.command()
def show(task_id: Annotated[str, typer.Argument()], source: Annotated[str, typer.Option()] = "bundled") -> None:
    """The statement of one task."""
    for task in load_tasks(source):
        if task.id == task_id:
            console.print(task.statement, markup=False, highlight=False)
            return
    raise ConfigError(f"there is no task called {task_id!r} in {source}; `sandlot tasks list {source}` names them")


@group.command()
def check(
    source: Source = "bundled",
    only: Annotated[list[str] | None, typer.Option("--only", help="This task only; may be given again.")] = None,
    sandbox: Annotated[str, typer.Option(help="Sandbox backend.")] = "local",
    concurrency: Annotated[int, typer.Option("-j", min=1, help="Gradings at once.")] = 2,
    as_json: JsonFlag = False,
) -> None:
    """Prove each task: its gold patch solves it, and the empty patch does not. Exit 1 when one fails."""
    tasks = [task for task in load_tasks(source) if not only or task.id in only]
    jobs = [*((task, task.gold_patch or b"") for task in tasks), *((task, b"") for task in tasks)]
    verdicts = grade_all(jobs, sandbox, concurrency)
    gold, empty = verdicts[: len(tasks)], verdicts[len(tasks) :]
    rows = []
    for task, with_gold, with_nothing in zip(tasks, gold, empty, strict=True):
        fine = task.gold_patch is not None and with_gold.solved and with_nothing.reward == 0
        why = "" if fine else "no gold patch" if task.gold_patch is None else with_gold.detail or with_nothing.detail
        rows.append({"task": task.id, "gold": with_gold.reward, "empty": with_nothing.reward, "ok": fine, "why": why})
    if as_json:
        print_json(rows)
    else:
        table = Table("task", "gold patch", "empty patch", "", "why")
        for row in rows:
            shown = ["ungraded" if row[k] is None else f"{row[k]:g}" for k in ("gold", "empty")]
            table.add_row(str(row["task"]), *shown, "[green]ok[/]" if row["ok"] else "[red]no[/]", str(row["why"]))
        console.print(table)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _facts(task: Task) -> dict[str, str]:
    title = next(line.strip("# ").strip() for line in task.statement.splitlines() if line.strip())
    return {"id": task.id, "grading": type(task.grading).__name__.removesuffix("Grading").lower(), "title": title}
