"""The grader of Harbor tasks: `test.sh` in a fresh sandbox, and the reward file that it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandlot.errors import GradingError, SandboxLostError
from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.credit import weighted
from sandlot.grading.names import PASSED
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import Report, interrupted, session_fault
from sandlot.tasks.task import HarborGrading
from sandlot.workspace.apply import File, tar_of

LOGS = "/logs/verifier"
TESTS = "/tests"
_NAMES = ("reward.json", "reward.txt")
_SIZE = 1 << 20
_CLEAR = f"""set -e
rm -rf {TESTS} /solution {LOGS}
mkdir -p {TESTS} {LOGS} /logs/agent /logs/artifacts
chmod 755 {TESTS}
chmod 1777 {LOGS}
[ -z "$(ls -A {LOGS})" ]
"""


async def grade_harbor(bench: Bench) -> Verdict:
    """The number that the verifier wrote: `reward.json` (an object of numbers) or else `reward.txt`.

    Nothing of the agent but its diff is in this sandbox; the place of the reward is made empty and seen to be empty
    first. Numbers must be finite and in [0, 1]. A file that is missing or unreadable is ungraded, unless the base
    without the patch gets one. The exit status says nothing. Where the verifier ran pytest, a reward that its sessions
    contradict is not believed.
    """
    grading = bench.task.grading
    assert isinstance(grading, HarborGrading)
    await bench.put_hidden({}, lock=False)
    cleared = await bench.sandbox.exec(["/bin/sh", "-c", _CLEAR], user="root", cwd="/", timeout=120)
    if not cleared.ok:
        raise GradingError(f"the place of the reward could not be emptied: {cleared.text()[-500:]}")
    files = {path.encode(): File("100755", bench.test(path, data)) for path, data in grading.files.items()}
    await bench.sandbox.upload_tar(TESTS, tar_of(files), user="root")
    script = f"bash {TESTS}/test.sh 2>&1 | tee {LOGS}/test-stdout.txt"
    report, result = await bench.work(
        "command",
        controls=[],
        timeout=grading.timeout,
        user=grading.user,
        env=grading.env,
        argv=["bash", "-o", "pipefail", "-c", script],
    )
    await bench.sandbox.kill_processes()
    if detail := interrupted(report, result, grading.timeout):
        raise NothingReportedError(f"the verifier gave no reward: {detail}")
    name, rewards = await _rewards(bench)
    reward = weighted(bench.task.options, rewards)
    bench.evidence["rewards"], bench.evidence["reward_file"], bench.evidence["reported"] = rewards, name, 1
    fault = "" if reward == 0 else forged(name, grading.files) or contradicted(report, reward)
    return Verdict(0.0 if fault else reward, detail=fault, tests=report.tests, evidence=bench.evidence)


async def _rewards(bench: Bench) -> tuple[str, dict[str, float]]:
    """The reward file's name and its numbers."""
    for name in _NAMES:
        try:
            data = await bench.sandbox.read_file(f"{LOGS}/{name}", max_bytes=_SIZE)
        except FileNotFoundError:
            continue
        except SandboxLostError:
            raise
        except Exception as error:
            raise NothingReportedError(f"{name} cannot be read: {error}") from None
        try:
            return name, read_rewards(name, data)
        except ValueError as error:
            raise NothingReportedError(f"{name}: {error}") from None
    raise NothingReportedError("the verifier wrote neither reward.json nor reward.txt")


def read_rewards(name: str, data: bytes) -> dict[str, float]:
    """The numbers of a reward file; `ValueError` with the reason for anything that is none."""
    try:
        text = data.decode("utf-8").strip()
        value: Any = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
    except (ValueError, RecursionError):
        raise ValueError(f"{data[:80]!r} is no reward") from None
    if not isinstance(value, dict) or not value:
        raise ValueError("must be an object of numbers")
    found = {}
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{key}: {number!r} is no number")
        if not 0 <= number <= 1:  # which NaN is not either
            raise ValueError(f"{key}: {number!r} is not in [0, 1]")
        found[str(key)] = float(number)
    return found


def forged(name: str, files: Mapping[str, bytes]) -> str:
    """Why a reward file cannot be the verifier's: it writes one of the two names, and this is the other."""
    other = next(n for n in _NAMES if n != name)
    if any(name.encode() in data for data in files.values()):
        return ""
    if any(other.encode() in data for data in files.values()):
        return f"something wrote {name}, but the verifier writes {other}"
    return ""


def contradicted(report: Report, reward: float) -> str:
    """What the pytest sessions of the verifier say against its reward, or nothing."""
    if not report.sessions:
        return ""
    if fault := session_fault(report):
        return fault
    if PASSED not in report.tests.values():
        return "the verifier gave a reward, but none of its tests passed"
    failed = [name for name, outcome in report.tests.items() if outcome in ("failed", "error")]
    if reward == 1 and (failed or report.errors):
        return f"the verifier gave 1, but {next(iter([*failed, *report.errors]))} did not pass"
    return ""
