"""Read what the worker in the sandbox reported, and judge whether it can be believed."""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sandlot.grading.names import ERROR, FAILED, PASSED, worst
from sandlot.sandbox import ExecResult

CONTROL_TESTS = {"fails": False, "raises": False, "expects": False, "compares": False, "holds": True}
"""The control tests by name, and whether each must pass. A run in which one of them does not is not believed."""


def control_source(names: Iterable[str]) -> bytes:
    """A test file whose tests must fail (and one that must pass) whatever the code under test does.

    `names` are the plain function names of required tests. Each is among the failing ones, so that a patched runner
    that lets tests pass by their name lets these pass too; and the control tests begin like the first of them, so that
    they are collected where tests are called otherwise than `test_…`.
    """
    functions = [name for name in dict.fromkeys(names) if name.isidentifier() and not keyword.iskeyword(name)]
    prefix = functions[0] if functions else "test"
    bodies = {f"{prefix}_{_CONTROL}_{name}": body for name, body in _CONTROL_BODIES.items()}
    bodies.update(dict.fromkeys(functions, "assert 0 == 1"))
    return ("import pytest\n" + "".join(f"\n\ndef {name}():\n    {body}\n" for name, body in bodies.items())).encode()


_CONTROL = "control"
_CONTROL_BODIES = {
    "fails": "assert False",
    "holds": "assert True",
    "raises": 'raise ValueError("expected")',
    "expects": "with pytest.raises(KeyError):\n        pass",
    "compares": "assert [1, 2] == [1, 3]",
}


@dataclass(frozen=True)
class Report:
    """One run of the worker, as its channel told it.

    `started` is false when the worker did not even come to the code under test: that is nobody's doing but ours.
    `stray` is what came over the channel from anybody but a test session. `tests` maps test names to results, `errors`
    files that could not be collected to the reason; `collected` and `reported` are the names of each session's tests.
    `foreign_skips` are tests or files that something outside of their own file made pytest skip; `broken` are functions
    of the test runner that were changed while it ran.
    """

    started: bool = False
    ended: int | None = None
    tests: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    foreign_skips: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    sessions: dict[str, int | None] = field(default_factory=dict)
    collected: dict[str, set[str]] = field(default_factory=dict)
    reported: dict[str, set[str]] = field(default_factory=dict)
    stray: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def read_report(stdout: bytes, nonce: str) -> Report:
    """Parse the channel. Only whole events in lines that begin with the nonce count; anything else is stray."""
    report = Report()
    facts: dict[str, Any] = {"started": False, "ended": None, "versions": {}}
    stray = []
    prefix = nonce.encode() + b" "
    for line in filter(None, stdout.split(b"\n")):
        try:
            if not line.startswith(prefix):
                raise ValueError("no nonce")
            event = json.loads(line[len(prefix) :])
            if event["event"] == "stray":
                stray.append(str(event["text"]))
            else:
                _take(report, facts, event)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            stray.append(line.decode("utf-8", "backslashreplace"))
    return replace(report, stray="\n".join(stray)[:4000], **facts)


def _take(report: Report, facts: dict[str, Any], event: dict[str, Any]) -> None:
    session = str(event.get("session", ""))
    match event.get("event"):
        case "hello":
            facts["started"] = True
            facts["versions"] = {"python": str(event["python"]), "pytest": str(event["pytest"])}
        case "start":
            report.sessions[session] = None
        case "collected":
            report.collected[session] = {str(name) for name in event["ids"]}
        case "collect_error":
            report.errors[str(event["id"])] = str(event["text"])
        case "test":
            name = str(event["id"])
            report.tests[name] = worst([str(event["result"]), report.tests.get(name, PASSED)])
            report.reported.setdefault(session, set()).add(name)
            if event["text"]:
                report.texts[name] = str(event["text"])
        case "broken":
            report.broken.extend(str(name) for name in event["names"])
        case "foreign_skip":
            report.foreign_skips.append(str(event["id"]))
        case "finish":
            report.sessions[session] = int(event["status"])
        case "end":
            facts["ended"] = int(event["status"])
        case other:
            raise ValueError(f"no event {other!r}")


def doubts(report: Report, result: ExecResult, controls: Iterable[str]) -> list[str]:
    """Reasons not to believe a run: each is something that an honest run cannot show. `controls` are the files of
    control tests, whose results are taken out of the report here."""
    found = [*tampering(report), *unreported(report)]
    if report.ended is None:
        found.append("the run ended before the test runner did")
    elif result.exit_code != report.ended:
        found.append(f"the runner ended with status {report.ended}, but its process with {result.exit_code}")
    for file in controls:
        mine = {name: outcome for name, outcome in report.tests.items() if _is_in(name, file)}
        for control, must_pass in CONTROL_TESTS.items():
            if not must_pass and not any(name.endswith(f"_{_CONTROL}_{control}") for name in mine):
                found.append(f"the control test {control!r}, which must fail, is missing")
        for name, outcome in mine.items():
            if outcome not in (FAILED, ERROR) and not name.endswith(f"_{_CONTROL}_holds"):
                found.append(f"the control test {name!r}, which must fail, is reported as {outcome}")
    return list(dict.fromkeys(found))


def tampering(report: Report) -> list[str]:
    """What speaks against the channel, the test runner and the sessions: each must have come to its end, and told of
    nothing but what it collected."""
    found = []
    if report.stray:
        found.append(f"something else wrote to the result channel: {report.stray[:200]}")
    if report.broken:
        found.append(f"the test runner was changed while it ran: {report.broken[0]}")
    for session, status in report.sessions.items():
        if status is None:
            found.append(f"the test session {session} did not finish")
        elif session in report.collected and (more := report.reported.get(session, set()) - report.collected[session]):
            found.append(f"the test session {session} reported {min(more)}, which it did not collect")
    return found


def unreported(report: Report) -> list[str]:
    """The sessions that collected tests and did not report them all. An honest one may, by its own settings (`-x`)."""
    return [
        f"the test session {session} did not report {min(left)}, which it collected"
        for session, status in report.sessions.items()
        if status is not None and (left := report.collected.get(session, set()) - report.reported.get(session, set()))
    ]


def session_fault(report: Report) -> str:
    """What speaks against the pytest sessions of a run, whatever their tests said; or nothing."""
    if found := [*tampering(report), *unreported(report)]:
        return found[0]
    if report.foreign_skips:
        return f"{report.foreign_skips[0]} was skipped by the code under test"
    return ""


def interrupted(report: Report, result: ExecResult, timeout: float) -> str:
    """Why a run broke off, or nothing."""
    if result.timed_out:
        return f"it did not end within {timeout:g} s"
    if result.out_of_memory:
        return "it used more memory than the sandbox has"
    if report.ended is None:
        return "it was killed before its end"
    return ""


def without_controls(report: Report, controls: Iterable[str]) -> dict[str, str]:
    """The results of the task's own tests."""
    files = list(controls)
    return {name: result for name, result in report.tests.items() if not any(_is_in(name, file) for file in files)}


def _is_in(name: str, file: str) -> bool:
    return name.partition("::")[0].rpartition("/")[2] == file.rpartition("/")[2]
