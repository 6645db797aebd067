"""Known solutions for the scripted policy engine: what a competent agent would do, task by task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sandlot.errors import ConfigError
from sandlot.tasks import Task


def solution_scripts(tasks: Iterable[Task]) -> dict[str, Any]:
    """A script file (see `sandlot.engine.scripted.script`) that solves each task with its gold patch.

    Every turn calls the agent's shell tool, which all coding agents offer under the name `bash` in some spelling.
    """
    return {"scripts": [_script(task) for task in tasks], "fallback": {"text": "The work is done."}}


def idle_scripts(tasks: Iterable[Task]) -> dict[str, Any]:
    """A script file that looks around and changes nothing: every task must come out unsolved."""
    look = {"text": "I looked and leave everything as it is.", "calls": [_bash("ls")]}
    return {"scripts": [{"match": marker(task), "steps": [look]} for task in tasks], "fallback": {"text": "Done."}}


def marker(task: Task) -> str:
    """A line of the statement by which the task is known in a prompt."""
    return max((line.strip() for line in task.statement.splitlines()), key=len)


def _script(task: Task) -> dict[str, Any]:
    if task.gold_patch is None:
        raise ConfigError(f"task {task.id} has no gold patch, so the scripted engine has no solution for it")
    try:
        patch = task.gold_patch.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the gold patch of task {task.id} is no text; the scripted engine cannot write it"
        ) from error
    look = _bash("ls -la; git log --oneline | head -5")
    mend = _bash(f"git apply --whitespace=nowarn - <<'PATCH_ENDS_HERE'\n{patch}PATCH_ENDS_HERE\n")
    test = _bash("python3 -m pytest -q 2>&1 | tail -n 5")
    steps = [
        {"reasoning": "First I look at the repository.", "text": "Let me look around.", "calls": [look]},
        {"reasoning": "I know what is wrong.", "calls": [mend]},
        {"text": "Now the tests.", "calls": [test, _bash("git status --short")]},
        {"text": "Fixed; the tests pass."},
    ]
    return {"match": marker(task), "steps": steps}


def _bash(command: str) -> dict[str, Any]:
    return {"tool": "bash", "arguments": {"command": command}}
