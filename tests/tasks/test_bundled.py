"""Every bundled task, graded in real sandboxes: its gold patch solves it and the empty patch does not."""

import pytest

from sandlot.grading import grade
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import Task, load_tasks

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TASKS = load_tasks("bundled")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
async def test_gold_is_1_and_empty_is_0(backend: SandboxBackend, task: Task) -> None:
    assert task.gold_patch is not None
    gold = await grade(task, task.gold_patch, backend)
    assert gold.reward == 1.0, (gold.failure, gold.detail, gold.tests, gold.evidence)
    empty = await grade(task, b"", backend)
    assert empty.reward == 0.0, (empty.failure, empty.detail, empty.evidence)
