"""The grader of hidden pytest files with tests that must pass."""

from __future__ import annotations

from pathlib import PurePosixPath

from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.names import PASSED, match, required_tests
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import doubts, without_controls
from sandlot.tasks.task import PytestGrading


async def grade_pytest(bench: Bench) -> Verdict:
    """Reward 1 when every required test passed in a run that can be believed, otherwise 0.

    A run that broke off (time limit, memory limit, a process that ended early) after the runner had started is the
    patch's doing, provided that the control tests still run in the same sandbox; otherwise it is ungraded.
    """
    grading = bench.task.grading
    assert isinstance(grading, PytestGrading)
    required = required_tests(grading)
    files = list(dict.fromkeys(name.partition("::")[0] for name in required))
    await bench.put_hidden(grading.files, files)
    names = [function_of(name) for name in required]
    controls = await bench.put_controls([str(PurePosixPath(grading_dir(files)))], names)
    report, result = await bench.work(
        "pytest", controls=controls, timeout=grading.timeout, required=required, files=[*files, *controls]
    )
    tests, repairs = match(required, without_controls(report, controls))
    found = doubts(report, result, controls)
    found += [f"{path} was changed while the tests ran" for path in await bench.changed_tests()]
    bench.evidence["repairs"], bench.evidence["doubts"] = repairs, found
    bench.evidence["reported"] = len(report.tests)
    not_passed = [name for name, outcome in tests.items() if outcome != PASSED]
    if result.timed_out or result.out_of_memory or report.ended is None:
        await bench.runner_works()
    elif not report.tests:
        raise NothingReportedError(f"no test was reported: {found[0]}")
    if result.timed_out:
        detail = f"the tests did not end within {grading.timeout:g} s"
    elif result.out_of_memory:
        detail = "the tests used more memory than the sandbox has"
    elif found:
        detail = f"the test run cannot be believed: {found[0]}"
    elif not_passed:
        detail = f"{len(not_passed)} of {len(tests)} required tests did not pass"
    else:
        return Verdict(1.0, tests=tests, evidence=bench.evidence)
    return Verdict(0.0, detail=detail, tests=tests, evidence=bench.evidence)


def function_of(name: str) -> str:
    """The plain function name in a test's full name."""
    return name.rpartition("::")[2].partition("[")[0].strip()


def grading_dir(files: list[str]) -> str:
    """Where the control tests go: beside the first required test."""
    return files[0].rpartition("/")[0] if files else "."
