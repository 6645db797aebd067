"""Five tasks in Harbor's own layout, as `tasks check` sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.grading import grade
from sandlot.grading.check import check_task, solution
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import Task, load_tasks

pytestmark = pytest.mark.asyncio(loop_scope="module")
DATA = Path(__file__).parents[1] / "data" / "harbor"
TASKS = {task.id: task for task in load_tasks(DATA / "registry.json")}


async def test_the_registry_and_the_directory_hold_the_same() -> None:
    assert list(TASKS) == ["roman-numbers", "rotate-logs", "short-and-right", "unit-table", "word-report"]
    assert load_tasks(DATA) == list(TASKS.values())


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
async def test_each_holds(backend: SandboxBackend, task: Task) -> None:
    with_cheats = task.id == "roman-numbers"
    checked = await check_task(task, backend, cheats=with_cheats)
    assert checked.faults == ()
    assert (checked.gold, checked.empty) == (1.0, 0.0)
    assert len(checked.cheats) == (18 if with_cheats else 0)


async def test_a_part_of_the_work_earns_a_part(backend: SandboxBackend) -> None:
    """Half of the units, and a right file that is long: each verifier says its own."""
    units = await solution(TASKS["unit-table"], backend)
    half = units.replace(b', "in": 0.0254, "ft": 0.3048', b"")
    assert half != units
    verdict = await grade(TASKS["unit-table"], half, backend)
    assert verdict.reward == pytest.approx(6 / 20)
    primes = (await solution(TASKS["short-and-right"], backend)).decode()
    long = primes.replace("@@ -0,0 +1,2 @@\n", "@@ -0,0 +1,14 @@\n" + "+# more\n" * 12)
    verdict = await grade(TASKS["short-and-right"], long.encode(), backend)
    assert (verdict.reward, verdict.evidence["rewards"]) == (0.75, {"right": 1.0, "short": 0.0})
