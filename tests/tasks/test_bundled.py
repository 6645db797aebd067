"""Every bundled task, graded in real sandboxes: its solution solves it, and neither nothing nor a cheat does."""

import hashlib

import pytest

from sandlot.grading.cheats import CHEATS
from sandlot.grading.check import check_task
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import PytestGrading, Task, load_tasks
from sandlot.workspace.repository import built
from support.deal import dealt

TASKS = load_tasks("bundled")
NAMED = [task.id for task in TASKS if isinstance(task.grading, PytestGrading)]
TRIED = dealt(NAMED, CHEATS) | dealt([task.id for task in TASKS if task.id not in NAMED], CHEATS)
"""Each cheat on one task with named tests, and on one of another form."""


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_no_hidden_test_is_in_the_agents_repository(task: Task) -> None:
    """By content: the files of the tests that must begin to pass are no object of it."""
    assert task.repository is not None
    store = built(task.repository).store
    listed = store.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").decode().split()
    for path, content in getattr(task.grading, "files", {}).items():
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if any(name.startswith(f"{path}::") for name in getattr(task.grading, "fail_to_pass", ())):
            assert blob not in listed, path


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
async def test_the_solution_is_1_and_nothing_and_cheats_are_0(backend: SandboxBackend, task: Task) -> None:
    checked = await check_task(task, backend, cheats=TRIED[task.id])
    assert (checked.gold, checked.again, checked.empty, checked.faults) == (1.0, 1.0, 0.0, ())
