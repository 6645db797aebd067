"""The grader of a pytest script (`f2p_script`): each of its tests must pass."""

from __future__ import annotations

import secrets

from sandlot.grading.bench import Bench
from sandlot.grading.names import PASSED
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import without_controls
from sandlot.tasks.task import ScriptGrading


async def grade_script(bench: Bench) -> Verdict:
    """Run the script as a program; it calls `pytest.main` itself. Reward 1 when it ends with status 0, ran at least one
    test and every test passed: skipped ones have not. It lies outside the workdir, where a patch cannot reach it."""
    grading = bench.task.grading
    assert isinstance(grading, ScriptGrading)
    await bench.put_hidden({})
    place = f"/tmp/f2p-{secrets.token_hex(6)}"
    script = f"{place}/test_f2p.py"
    await bench.sandbox.write_file(script, bench.test("test_f2p.py", grading.script.encode()), user="root")
    await bench.sandbox.exec(["chmod", "755", place], user="root")
    controls = await bench.put_controls(["."], [])
    report, result = await bench.work("script", controls=controls, timeout=grading.timeout, script=script)
    tests = without_controls(report, controls)
    not_passed = [name for name, outcome in tests.items() if outcome != PASSED]
    if fault := await bench.fault_of(report, result, controls, grading.timeout, "the script"):
        detail = fault
    elif report.errors:
        detail = f"{next(iter(report.errors))} could not be collected"
    elif not tests:
        detail = "the script ran no test"
    elif not_passed:
        detail = f"{len(not_passed)} of {len(tests)} tests did not pass"
    elif report.ended != 0:
        detail = f"the script ended with status {report.ended}"
    else:
        return Verdict(1.0, tests=tests, evidence=bench.evidence)
    return Verdict(0.0, detail=detail, tests=tests, evidence=bench.evidence)
