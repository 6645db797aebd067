"""The grader of R2E-Gym rows: tests known by their names without the file, and what each should say."""

from __future__ import annotations

from sandlot.errors import GradingError
from sandlot.grading.bench import Bench
from sandlot.grading.credit import verdict_of_tests
from sandlot.grading.named_tests import run_pytest
from sandlot.grading.names import PASSED, match, worst
from sandlot.grading.verdict import Verdict
from sandlot.tasks.task import R2EGrading


async def grade_r2e(bench: Bench) -> Verdict:
    """Reward 1 when every test that passes with the real fix passed.

    The others failed with the real fix too, so what they say counts for nothing.
    """
    grading = bench.task.grading
    assert isinstance(grading, R2EGrading)
    required = [name for name, status in grading.expected.items() if status == "PASSED"]
    files = {**bench.checked_out, **grading.files}
    modules = [path for path in files if path.endswith(".py") and not path.endswith(("/__init__.py", "/conftest.py"))]
    if not required or not modules:
        raise GradingError("the task names no test that must pass, or has no test file")
    ran = await run_pytest(bench, files, modules, grading.timeout, required=None)
    by_name: dict[str, str] = {}
    for node, outcome in ran.tests.items():
        name = ".".join(node.split("::")[1:])
        by_name[name] = worst([outcome, by_name.get(name, PASSED)])
    tests, bench.evidence["repairs"] = match(required, by_name)
    return verdict_of_tests(bench.task.options, tests, required, (), bench.evidence, ran.fault)
