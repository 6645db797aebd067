"""Ten SWE-bench rows made of real releases: the real fix solves each, by our pytest and by the official parsers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandlot.errors import FailureKind
from sandlot.grading import grade
from sandlot.grading.cheats import CHEATS
from sandlot.grading.check import check_task
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import SwebenchGrading
from support.deal import dealt
from support.swebench_rows import FILE, TASKS, by_log

pytestmark = pytest.mark.asyncio(loop_scope="module")
OFFICIAL = os.environ.get("SANDLOT_TEST_SWEBENCH_PYTHON", "")


async def test_there_are_ten_and_each_is_of_the_form() -> None:
    assert len(TASKS) == 10
    for task in TASKS.values():
        assert isinstance(task.grading, SwebenchGrading)
        assert task.gold_patch
        assert task.grading.fail_to_pass


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cheats"), dealt(TASKS, CHEATS).items(), ids=TASKS)
async def test_the_real_fix_is_1_and_nothing_and_cheats_are_0(
    backend: SandboxBackend, name: str, cheats: list[str]
) -> None:
    checked = await check_task(TASKS[name], backend, cheats=cheats)
    assert checked.faults == ()
    assert list(checked.cheats) == cheats


@pytest.mark.slow
@pytest.mark.skipif(not OFFICIAL, reason="SANDLOT_TEST_SWEBENCH_PYTHON names no interpreter with the swebench package")
async def test_the_official_package_says_the_same() -> None:
    """In an environment of its own, which `tools/swebench-env.sh` makes."""
    tests = Path(__file__).with_name("test_swebench_official.py")
    argv = [OFFICIAL, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    ran = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "skipped" not in ran.stdout


async def test_without_the_package_only_pytests_names_can_be_graded(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandlot.grading.swebench.has_swebench", lambda: False)
    task = by_log(TASKS["parse__parse-1.20.2"])
    assert (await grade(task, task.gold_patch or b"", backend)).reward == 1.0
    assert isinstance(task.grading, SwebenchGrading)
    other = replace(task, grading=replace(task.grading, fail_to_pass=("test_x (m.C)",)))
    verdict = await grade(other, b"", backend)
    assert verdict.reward is None
    assert "pip install 'sandlot[swebench]'" in verdict.detail


async def test_a_parser_that_breaks_is_the_graders_fault(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(log: str, spec: object) -> dict[str, str]:
        raise IndexError("list index out of range")

    class TestSpec:
        def __init__(self, **facts: object) -> None: ...

    modules = {
        "swebench.harness.log_parsers": {"PARSER_REGISTRY": {"x": breaks}},
        "swebench.types": {"TestSpec": TestSpec},
    }
    monkeypatch.setattr("sandlot.grading.swebench.import_module", lambda name: SimpleNamespace(**modules[name]))
    verdict = await grade(by_log(TASKS["parse__parse-1.20.2"], "x"), b"", backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)
    assert "the log parser x failed on the log of the tests: IndexError" in verdict.detail


async def test_the_rows_are_what_the_data_set_would_hold() -> None:
    columns = {"instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "version"}
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        assert columns | {"FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"} <= row.keys()
