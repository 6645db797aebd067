"""Ways to look solved without solving: each is graded 0, and the true fix 1."""

import pytest

from sandlot.grading import grade
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import PytestGrading
from support.cheats import CHEATS, FAIL_TO_PASS, FIXED, GRADING, at_import, calc_patch, calc_task
from support.honest_suite import NAMES, SOURCE

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_true_fix_is_solved(backend: SandboxBackend) -> None:
    verdict = await grade(calc_task(), calc_patch({"calc/core.py": FIXED}), backend)
    assert (verdict.reward, verdict.failure, verdict.detail) == (1.0, None, "")
    assert set(verdict.tests.values()) == {"passed"}
    assert verdict.evidence["applied"]["files"] == ["calc/core.py"]
    assert verdict.evidence["runs"][0]["exit_code"] == 1, "the control tests fail"


async def test_the_empty_patch_is_not(backend: SandboxBackend) -> None:
    verdict = await grade(calc_task(), calc_patch({}), backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert {name for name, result in verdict.tests.items() if result != "passed"} == set(FAIL_TO_PASS)


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_cheat_earns_nothing(backend: SandboxBackend, cheat: str) -> None:
    verdict = await grade(calc_task(), calc_patch(CHEATS[cheat]), backend)
    assert verdict.reward == 0.0, (verdict.failure, verdict.detail, verdict.evidence)
    assert verdict.detail


async def test_a_hanging_fix_is_the_policys_doing(backend: SandboxBackend) -> None:
    grading = type(GRADING)(GRADING.files, GRADING.fail_to_pass, GRADING.pass_to_pass, timeout=4.0)
    verdict = await grade(calc_task(grading), calc_patch(at_import("while True: pass")), backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert verdict.detail == "the tests did not end within 4 s"
    assert [run["label"] for run in verdict.evidence["runs"]] == ["tests", "control"]


async def test_a_cheat_beside_the_true_fix_is_taken_out_and_listed(backend: SandboxBackend) -> None:
    files = {"calc/core.py": FIXED, "conftest.py": "import os\nos._exit(0)\n", "tests/test_core.py": "x = 1\n"}
    verdict = await grade(calc_task(), calc_patch(files), backend)
    assert verdict.reward == 1.0
    assert set(verdict.evidence["reverted"]) == {"conftest.py", "tests/test_core.py"}


async def test_an_honest_suite_that_touches_everything_is_believed(backend: SandboxBackend) -> None:
    grading = PytestGrading({"tests/test_core.py": SOURCE}, NAMES, timeout=60.0)
    verdict = await grade(calc_task(grading), calc_patch({"calc/core.py": FIXED}), backend)
    assert verdict.reward == 1.0, (verdict.detail, verdict.tests, verdict.evidence)
