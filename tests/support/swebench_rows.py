"""Ten SWE-bench rows made of real releases, as the data set tells them and as its newer ones do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sandlot.tasks import SwebenchGrading, Task, load_tasks

FILE = Path(__file__).parents[1] / "data" / "swebench" / "rows.jsonl"
TASKS = {task.id: task for task in load_tasks(FILE)}


def by_log(task: Task, parser: str = "parse_log_pytest_v2") -> Task:
    """The task as a row of the newer data sets tells it: with a command and the name of an official parser."""
    grading = task.grading
    assert isinstance(grading, SwebenchGrading)
    names = [name for name in (*grading.fail_to_pass, *grading.pass_to_pass) if " " not in name]
    files = " ".join(dict.fromkeys(name.partition("::")[0] for name in names))
    return replace(
        task,
        grading=replace(
            grading,
            fail_to_pass=tuple(name for name in grading.fail_to_pass if name in names),
            pass_to_pass=tuple(name for name in grading.pass_to_pass if name in names),
            command=f"python3 -m pytest -rA --tb=no -p no:cacheprovider {files}",
            log_parser=parser,
        ),
    )
