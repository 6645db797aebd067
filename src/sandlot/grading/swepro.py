"""The grader of the SWE-bench Pro form: a run script whose log a parser turns into named results."""

from __future__ import annotations

import json
import secrets
from typing import Any

from sandlot.errors import GradingError
from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.command import interrupted
from sandlot.grading.names import PASSED, match, required_tests, worst
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import Report
from sandlot.tasks.task import SweProGrading

_STATUSES = {"PASSED": PASSED, "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "skipped"}
_PARSER_TIMEOUT = 120.0


async def grade_swepro(bench: Bench) -> Verdict:
    """Reward 1 when the parser finds every required test passed in the run script's log, otherwise 0.

    Log and parser are out of the reach of the code under test: its output is collected outside, its processes are dead
    before the parser runs, and the parser runs as root without its workdir. A log can still be written by that code, so
    where the run used pytest a required test must also have been seen to pass. Nothing parsed is ungraded, unless a
    test session was seen to break off.
    """
    grading = bench.task.grading
    assert isinstance(grading, SweProGrading)
    files = {**bench.checked_out, **grading.files}
    await bench.put_hidden(files, [path for path in grading.selected_test_files if path not in files])
    place = f"/tmp/swepro-{secrets.token_hex(6)}"
    await bench.sandbox.write_file(f"{place}/run_script.sh", grading.run_script.encode(), mode=0o755, user="root")
    await bench.sandbox.exec(["chmod", "755", place], user="root")
    parting = secrets.token_hex(16)
    selected = ",".join(grading.selected_test_files)
    argv = ["/bin/sh", "-c", _CAPTURE, "sh", f"{place}/run_script.sh", selected, parting]
    report, result = await bench.work("command", controls=[], timeout=grading.timeout, argv=argv)
    stdout, _, stderr = result.stderr.rpartition(f"\n{parting}\n".encode())
    await bench.sandbox.kill_processes()
    parsed = await _parse(bench, grading, place, stdout, stderr)
    required = required_tests(grading)
    tests, repairs = match(required, parsed)
    bench.evidence["repairs"], bench.evidence["parsed"] = repairs, parsed
    bench.evidence["reported"] = len(parsed)
    if report.sessions:
        for name in required:
            if tests[name] == PASSED:
                tests[name] = _seen(name, report)
    if detail := interrupted(report, result, grading.timeout):
        await bench.runner_works(pytest=bool(report.sessions))
    broken = [session for session, status in report.sessions.items() if status is None]
    if not parsed and not detail and not broken:
        raise NothingReportedError("the parser found no test result in the log of the run script")
    not_passed = [name for name, outcome in tests.items() if outcome != PASSED]
    if not detail and broken:
        detail = f"the test session {broken[0]} did not finish"
    if not detail and report.broken:
        detail = f"the test runner was changed while it ran: {report.broken[0]}"
    if not detail and not_passed:
        detail = f"{len(not_passed)} of {len(tests)} required tests did not pass"
    return Verdict(0.0 if detail else 1.0, detail=detail, tests=tests, evidence=bench.evidence)


_CAPTURE = """err=$(mktemp)
bash "$1" "$2" 2>"$err"
status=$?
printf '\\n%s\\n' "$3"
cat "$err"
exit $status"""
"""Runs the script and prints its stdout, a line that parts, and its stderr."""


async def _parse(bench: Bench, grading: SweProGrading, place: str, stdout: bytes, stderr: bytes) -> dict[str, str]:
    """What the parser makes of the log: test name to result, the worst where a name has several."""
    parsing = f"{place}-parser"
    for name, data in (("parser.py", grading.parser_script.encode()), ("stdout.log", stdout), ("stderr.log", stderr)):
        await bench.sandbox.write_file(f"{parsing}/{name}", data, user="root")
    await bench.sandbox.exec(["chmod", "700", parsing], user="root")
    arguments = [f"{parsing}/{name}" for name in ("parser.py", "stdout.log", "stderr.log", "result.json")]
    done = await bench.sandbox.exec(["python3", "-I", *arguments], user="root", cwd=parsing, timeout=_PARSER_TIMEOUT)
    bench.evidence["parser"] = {"exit_code": done.exit_code, "log": done.text()[-4000:]}
    try:
        result: Any = json.loads(await bench.sandbox.read_file(f"{parsing}/result.json"))
        found: dict[str, str] = {}
        for test in result["tests"]:
            name, status = str(test["name"]), _STATUSES.get(str(test["status"]).upper(), "failed")
            found[name] = worst([status, found.get(name, status)])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise GradingError(f"the parser gave no readable result ({error}): {done.text()[-500:].strip()}") from None
    return found


def _seen(name: str, report: Report) -> str:
    """What the witness saw of a required test; names in logs may lack the directories in front."""
    outcomes = [r for seen, r in report.tests.items() if seen == name or seen.endswith(f"/{name}")]
    if outcomes:
        return worst(outcomes)
    return match([name], report.tests)[0][name]
