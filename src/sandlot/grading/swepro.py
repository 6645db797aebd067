"""The grader of the SWE-bench Pro form: a run script whose log a parser turns into named results."""

from __future__ import annotations

import json
import secrets

from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.logs import verdict_of_log
from sandlot.grading.names import PASSED, required_tests, worst
from sandlot.grading.verdict import Verdict
from sandlot.tasks.task import SweProGrading

_STATUSES = {"PASSED": PASSED, "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "skipped"}
_PARSER_TIMEOUT = 120.0


async def grade_swepro(bench: Bench) -> Verdict:
    """Reward 1 when the parser finds every required test passed in the run script's log, otherwise 0.

    Log and parser are out of the reach of the code under test: its output is collected outside, its processes are dead
    before the parser runs, and the parser runs as root without its workdir. A log can still be written by that code, so
    where the run used pytest a required test must also have been seen to pass. Nothing parsed, or nothing that the
    parser could read, is ungraded, unless a test session was seen to break off or the base without the patch is parsed.
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
    required_tests(grading)
    parsed = await _parse(bench, grading, stdout, stderr)
    run = (report, result)
    return await verdict_of_log(bench, parsed, grading.fail_to_pass, grading.pass_to_pass, run, grading.timeout)


_CAPTURE = """err=$(mktemp)
bash "$1" "$2" 2>"$err"
status=$?
printf '\\n%s\\n' "$3"
cat "$err"
exit $status"""
"""Runs the script and prints its stdout, a line that parts, and its stderr."""


async def _parse(bench: Bench, grading: SweProGrading, stdout: bytes, stderr: bytes) -> dict[str, str]:
    """What the parser makes of the log: test name to result, the worst where a name has several."""
    parsing = f"/tmp/parser-{secrets.token_hex(6)}"  # a name of which the code under test, now dead, knew nothing
    for name, data in (("parser.py", grading.parser_script.encode()), ("stdout.log", stdout), ("stderr.log", stderr)):
        await bench.sandbox.write_file(f"{parsing}/{name}", data, user="root")
    await bench.sandbox.exec(["chmod", "700", parsing], user="root")
    arguments = [f"{parsing}/{name}" for name in ("parser.py", "stdout.log", "stderr.log", "result.json")]
    done = await bench.sandbox.exec(["python3", "-I", *arguments], user="root", cwd=parsing, timeout=_PARSER_TIMEOUT)
    bench.evidence["parser"] = {"exit_code": done.exit_code, "log": done.text()[-4000:]}
    try:
        return read_results(await bench.sandbox.read_file(f"{parsing}/result.json"))
    except (FileNotFoundError, ValueError) as error:
        said = done.text()[-500:].strip()
        raise NothingReportedError(f"the parser gave no readable result ({error}): {said}") from None


def read_results(data: bytes) -> dict[str, str]:
    """The results by name, the worst where a name has several; `ValueError` with the reason for anything else."""
    found: dict[str, str] = {}
    try:
        for test in json.loads(data)["tests"]:
            name, status = str(test["name"]), _STATUSES.get(str(test["status"]).upper(), "failed")
            found[name] = worst([status, found.get(name, status)])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not an object with tests, each with a name and a status: {error!r}") from None
    return found
