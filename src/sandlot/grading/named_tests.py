"""The grader of hidden pytest files with tests that must pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sandlot.grading.bench import Bench
from sandlot.grading.credit import verdict_of_tests
from sandlot.grading.names import function_of, match, required_tests
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import without_controls
from sandlot.tasks.task import PytestGrading


@dataclass(frozen=True)
class Ran:
    """What a run of pytest told: `tests` by full name, and in `fault` why it earns nothing as a whole."""

    tests: Mapping[str, str]
    fault: str = ""


async def grade_pytest(bench: Bench) -> Verdict:
    """Reward 1 when every required test passed in a run that can be believed, otherwise 0 (or a fraction)."""
    grading = bench.task.grading
    assert isinstance(grading, PytestGrading)
    return await grade_named(
        bench,
        {**bench.checked_out, **grading.files},
        required_tests(grading),
        grading.fail_to_pass,
        grading.pass_to_pass,
        grading.timeout,
    )


async def grade_named(
    bench: Bench,
    hidden: Mapping[str, bytes | None],
    required: list[str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    timeout: float,
) -> Verdict:
    """Put the `hidden` files in, run the required tests with pytest, and judge them by their full names."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in required))
    ran = await run_pytest(bench, hidden, files, timeout, required=required)
    tests, bench.evidence["repairs"] = match(required, ran.tests)
    return verdict_of_tests(bench.task.options, tests, fail_to_pass, pass_to_pass, bench.evidence, ran.fault)


async def run_pytest(
    bench: Bench, hidden: Mapping[str, bytes | None], files: list[str], timeout: float, *, required: list[str] | None
) -> Ran:
    """Run the tests of `files` (those that are `required`, or all) between control tests."""
    await bench.put_hidden(hidden, files)
    names = [function_of(name) for name in required or ()]
    controls = await bench.put_controls([str(PurePosixPath(grading_dir(files)))], names)
    report, result = await bench.work(
        "pytest", controls=controls, timeout=timeout, required=required, files=[*files, *controls]
    )
    fault = await bench.fault_of(report, result, controls, timeout, "the tests")
    return Ran(without_controls(report, controls), fault)


def grading_dir(files: list[str]) -> str:
    """Where the control tests go: beside the first required test."""
    return files[0].rpartition("/")[0] if files else "."
