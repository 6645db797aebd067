"""The grader of a shell command (`eval_cmd`): its exit status, and the test sessions that it started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.names import PASSED
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import Report, interrupted, session_fault
from sandlot.tasks.task import CommandGrading

_MENTIONS_PYTEST = re.compile(r"\b(pytest|py\.test)\b")
_TEST_PATH = re.compile(r"[\w./-]+\.py\b")
_HERE_DOCUMENT = re.compile(
    r"^(?P<head>[^\n]*<<-?[ ]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n)(?P<body>.*?)(?=^\t*(?P=end)$)",
    re.MULTILINE | re.DOTALL,
)
_WRITTEN = re.compile(r">\s*(['\"]?)(?P<path>[^\s'\";&|<>$]+\.py)\1(?=\s|$)")


async def grade_command(bench: Bench) -> Verdict:
    """Reward 1 when the command ends with status 0 and every pytest session that it started was finished, with at least
    one test passed and none failed.

    A status alone is no proof: code under test can end its process with 0 before a test ran. A command that runs no
    pytest is judged by its status alone. One that names pytest but of which no session was seen is ungraded.
    """
    grading = bench.task.grading
    assert isinstance(grading, CommandGrading)
    named = [path.removeprefix("./") for path in _TEST_PATH.findall(grading.command)]
    # A command may bring its tests itself, so it must be able to write where they go.
    await bench.put_hidden(grading.files, [path for path in named if is_test(path)], lock=bool(grading.files))
    command = with_tests(grading.command, bench.task.workdir, bench.test)
    report, result = await bench.work("command", controls=[], timeout=grading.timeout, argv=["/bin/sh", "-c", command])
    tests = dict(report.tests)
    bench.evidence["reported"] = len(report.sessions)
    if detail := interrupted(report, result, grading.timeout):
        await bench.runner_works(pytest=bool(report.sessions))
    elif report.ended != 0:
        detail = f"the command ended with status {report.ended}"
    elif fault := _not_passed(report):
        detail = fault
    elif _MENTIONS_PYTEST.search(grading.command) and not report.sessions:
        raise NothingReportedError("the command ended with 0, but no pytest session of it was seen")
    else:
        return Verdict(1.0, tests=tests, evidence=bench.evidence)
    return Verdict(0.0, detail=detail, tests=tests, evidence=bench.evidence)


def with_tests(command: str, workdir: str, test: Callable[[str, bytes], bytes]) -> str:
    """`command` whose here-documents that write Python files hold what `test` says of each path and content."""

    def held(found: re.Match[str]) -> str:
        written = _WRITTEN.search(found["head"])
        if written is None:
            return found[0]
        path = PurePosixPath(written["path"])
        path = path.relative_to(workdir) if path.is_relative_to(workdir) else path
        body = test(str(path), found["body"].encode("utf-8", "surrogatepass"))
        return found["head"] + body.decode("utf-8", "surrogatepass")

    return _HERE_DOCUMENT.sub(held, command)


def is_test(path: str) -> bool:
    """Whether a path in a command looks like a test file of the workdir."""
    return not path.startswith("/") and bool(re.search(r"(^|/)(tests?/|test_[^/]*$)|_test\.py$", path))


def _not_passed(report: Report) -> str:
    """What speaks against the pytest sessions of a command that ended with 0, or nothing."""
    if not report.sessions:
        return ""
    if fault := session_fault(report):
        return fault
    bad = [name for name, outcome in report.tests.items() if outcome in ("failed", "error")]
    if bad:
        return f"{bad[0]} did not pass"
    if PASSED not in report.tests.values():
        return "no test passed"
    return ""
