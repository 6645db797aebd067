"""Verdicts from a log that a parser has read: swayed by nothing that the code under test can print alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.credit import verdict_of_tests
from sandlot.grading.names import PASSED, match, worst
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import Report, interrupted, tampering
from sandlot.sandbox import ExecResult


async def verdict_of_log(
    bench: Bench,
    parsed: Mapping[str, str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    run: tuple[Report, ExecResult],
    timeout: float,
) -> Verdict:
    """Reward 1 when every required test passed by the log and, where the run used pytest, was also seen to pass.

    Nothing parsed is ungraded, unless a test session was seen to break off.
    """
    report, result = run
    required = [*fail_to_pass, *pass_to_pass]
    tests, repairs = match(required, parsed)
    bench.evidence["repairs"], bench.evidence["parsed"] = repairs, dict(parsed)
    bench.evidence["reported"] = len(parsed)
    if report.sessions:
        for name in required:
            if tests[name] == PASSED:
                tests[name] = _seen(name, report)
    if fault := interrupted(report, result, timeout):
        await bench.runner_works(pytest=bool(report.sessions))
    elif found := tampering(report):
        fault = found[0]
    elif not parsed:
        raise NothingReportedError("the parser found no test result in the log of the tests")
    return verdict_of_tests(bench.task.options, tests, fail_to_pass, pass_to_pass, bench.evidence, fault)


def _seen(name: str, report: Report) -> str:
    """What the witness saw of a required test; names in logs may lack the directories in front."""
    outcomes = [r for seen, r in report.tests.items() if seen == name or seen.endswith(f"/{name}")]
    if outcomes:
        return worst(outcomes)
    return match([name], report.tests)[0][name]
