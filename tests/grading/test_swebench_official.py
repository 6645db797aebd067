"""The official `swebench` package on our logs: its parsers judge, and its report comes to the same.

Skipped without the package; `test_swebench_rows.py` runs this in an environment that has it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.errors import FailureKind, GradingError
from sandlot.grading import Verdict, grade
from sandlot.grading.swebench import has_swebench, official
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import GradingOptions, SwebenchGrading, Task
from support.swebench_rows import TASKS, by_log

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.skipif(not has_swebench(), reason="the swebench package is not installed"),
]
ONCE = GradingOptions(countercheck=False)


def reported(task: Task, verdict: Verdict, patch: bytes, log: Path) -> bool:
    """Whether the official report calls a run resolved, from the log of its tests."""
    from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    grading = task.grading
    assert isinstance(grading, SwebenchGrading)
    text = verdict.evidence["runs"][0]["log"]
    log.write_text(f"{START_TEST_OUTPUT}\n{text}\n{END_TEST_OUTPUT}\n")
    spec = TestSpec(
        instance_id=task.id, image="", eval_script_list=[], repo="", version="", log_parser=grading.log_parser,
        FAIL_TO_PASS=list(grading.fail_to_pass), PASS_TO_PASS=list(grading.pass_to_pass), eval_type="pass_and_fail",
    )  # fmt: skip
    prediction = {"instance_id": task.id, "model_name_or_path": "x", "model_patch": patch.decode()}
    report = get_eval_report(spec, prediction, str(log), include_tests_status=True)[task.id]
    assert report["patch_successfully_applied"]
    return bool(report["resolved"])


@pytest.mark.parametrize("name", {name.partition("__")[0]: name for name in TASKS}.values())
async def test_the_official_report_says_the_same(backend: SandboxBackend, name: str, tmp_path: Path) -> None:
    task = by_log(TASKS[name])
    for patch, reward in ((task.gold_patch or b"", 1.0), (b"", 0.0)):
        verdict = await grade(task, patch, backend, options=ONCE)
        assert verdict.reward == reward, (verdict.detail, verdict.evidence)
        assert verdict.evidence["parsed"]
        assert reported(task, verdict, patch, tmp_path / "log.txt") is (reward == 1.0)


async def test_an_unknown_parser_is_ungraded(backend: SandboxBackend) -> None:
    verdict = await grade(by_log(TASKS["parse__parse-1.20.2"], "parse_log_tea_leaves"), b"", backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)
    assert "no log parser called" in verdict.detail


async def test_a_log_of_the_official_form() -> None:
    grading = SwebenchGrading(b"", ("t.py::a",), log_parser="parse_log_pytest")
    log = "PASSED t.py::a\nFAILED t.py::b - assert 0\nSKIPPED [1] t.py:3: no\nXFAIL t.py::c\n"
    assert official(grading, log) == {"t.py::a": "passed", "t.py::b": "failed", "t.py::c": "skipped"}


JUNK = ("", "\x00", "PASSED", "[", "PASSED \nFAILED", "... ok\n" * 3, "test_x (m.C) ... ", "--- FAIL: ", "{" * 5000)


async def test_no_parser_makes_a_pass_of_junk_or_breaks_grading() -> None:
    from swebench.harness.log_parsers import PARSER_REGISTRY

    for parser in PARSER_REGISTRY:
        grading = SwebenchGrading(b"", ("t.py::a",), log_parser=parser)
        for log in JUNK:
            with suppress(GradingError):  # which leaves the patch ungraded
                assert official(grading, log).get("t.py::a") != "passed"
