"""Five tasks in Harbor's own layout, as `tasks check` sees them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandlot.cli.app import app
from sandlot.grading import grade
from sandlot.grading.check import cheat_patches, solution
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import load_tasks

pytestmark = pytest.mark.asyncio(loop_scope="module")
DATA = Path(__file__).parents[1] / "data" / "harbor"
TASKS = {task.id: task for task in load_tasks(DATA / "registry.json")}


async def test_the_registry_and_the_directory_hold_the_same() -> None:
    assert list(TASKS) == ["roman-numbers", "rotate-logs", "short-and-right", "unit-table", "word-report"]
    assert load_tasks(DATA) == list(TASKS.values())


@pytest.mark.slow
async def test_each_holds() -> None:
    command = ["tasks", "check", str(DATA / "registry.json"), "--no-cheats", "--json"]
    done = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [row["task"] for row in told] == list(TASKS)
    assert all((row["ok"], row["gold"], row["again"], row["empty"]) == (True, 1.0, 1.0, 0.0) for row in told)


@pytest.mark.slow
async def test_cheats_earn_nothing(backend: SandboxBackend) -> None:
    task = TASKS["roman-numbers"]
    patches = await cheat_patches(task, await solution(task, backend), backend)
    assert len(patches) == 18
    for name, patch in list(patches.items())[::3]:  # `test_cheats_everywhere.py` tries each on the form
        assert (name, (await grade(task, patch, backend)).reward) == (name, 0.0)


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
