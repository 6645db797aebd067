"""`tasks check`: what it proves of a good task, and how it finds each kind of bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandlot.grading.check import check_task, check_tasks
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import CommandGrading, HarborGrading
from support.cheats import calc_task
from support.repositories import write

pytestmark = pytest.mark.asyncio(loop_scope="module")


FEW = ("planted_reward", "deleted_tests", "told_run")
"""Whether all come to nothing is tried on real tasks; here it is about what is made of that."""


async def test_a_good_task_holds(backend: SandboxBackend) -> None:
    told: list[str] = []
    (checked,) = await check_tasks([calc_task()], backend, cheats=FEW, done=lambda row: told.append(row.task))
    assert (checked.gold, checked.again, checked.empty, checked.faults) == (1.0, 1.0, 0.0, ())
    assert checked.cheats == dict.fromkeys(FEW, 0.0)
    assert told == ["calc"]
    assert json.loads(json.dumps(checked.as_row()))["ok"] is True


async def test_a_grader_that_can_be_fooled_is_found(backend: SandboxBackend) -> None:
    """This one believes a file of the work tree."""
    grading = CommandGrading("grep -q 'a + b' calc/core.py || test -e reward.txt")
    checked = await check_task(calc_task(grading), backend, cheats=FEW)
    assert (checked.gold, checked.empty, checked.cheats["planted_reward"]) == (1.0, 0.0, 1.0)
    assert checked.faults == ("the cheat planted_reward earns 1",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("true", "the empty patch earns 1"),
        ("false", "the solution earns 0 (the command ended with status 1)"),
        (
            "python3 -c 'import calc; raise SystemExit(calc.add(1, 1) != 2 or __import__(\"os\").urandom(1)[0] < 128)'",
            "",
        ),
    ],
)
async def test_a_task_that_proves_nothing_is_found(backend: SandboxBackend, command: str, fault: str) -> None:
    for _ in range(12):
        checked = await check_task(calc_task(CommandGrading(command)), backend, cheats=())
        assert checked.cheats == {}
        if fault:
            assert checked.faults == (fault,)
            break
        if any("graded 1 and then 0" in f or "and then 1" in f for f in checked.faults):
            break
    else:
        pytest.fail("the flaky solution was never found in 12 tries")


async def test_a_task_without_a_known_solution_cannot_be_proven(backend: SandboxBackend) -> None:
    checked = await check_task(calc_task(gold_patch=None), backend)
    assert checked.faults == ("task calc has no known solution, so nothing can be proven",)


async def test_a_solution_script_is_run(backend: SandboxBackend, tmp_path: Path) -> None:
    write(tmp_path / "solution", {"solve.sh": "sed -i 's/a - b/a + b/' calc/core.py\n"})
    script = b"grep -q 'a + b' calc/core.py && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    task = calc_task(
        HarborGrading({"test.sh": script}), gold_patch=None, metadata={"solution": str(tmp_path / "solution")}
    )
    checked = await check_task(task, backend, cheats=())
    assert (checked.gold, checked.empty, checked.faults) == (1.0, 0.0, ())
    write(tmp_path / "solution", {"solve.sh": "exit 4\n"})
    assert "the solution script of task calc failed" in (await check_task(task, backend)).faults[0]
