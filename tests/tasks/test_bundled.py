"""Every bundled task, graded in real sandboxes: its gold patch solves it and the empty patch does not."""

import hashlib

import pytest

from sandlot.grading import grade
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import Task, load_tasks
from sandlot.workspace.repository import built

TASKS = load_tasks("bundled")


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
async def test_gold_is_1_and_empty_is_0(backend: SandboxBackend, task: Task) -> None:
    assert task.gold_patch is not None
    gold = await grade(task, task.gold_patch, backend)
    assert gold.reward == 1.0, (gold.failure, gold.detail, gold.tests, gold.evidence)
    empty = await grade(task, b"", backend)
    assert empty.reward == 0.0, (empty.failure, empty.detail, empty.evidence)
