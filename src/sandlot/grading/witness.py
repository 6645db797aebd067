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
    `stray` are bytes on the channel that the worker did not write. `tests` maps test names to results, `errors` files
    that could not be collected to the reason. `foreign_skips` are tests or files that something outside of their own
    file made pytest skip; `broken` are functions of the test runner that were changed while it ran.
    """

    started: bool = False
    ended: int | None = None
    tests: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    foreign_skips: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    sessions: dict[str, int | None] = field(default_factory=dict)
    collected: dict[str, int] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    stray: bytes = b""
    versions: Mapping[str, str] = field(default_factory=dict)


def read_report(stdout: bytes, nonce: str) -> Report:
    """Parse the channel. Only lines that begin with the nonce are events; anything else is stray."""
    report = Report()
    facts: dict[str, Any] = {"started": False, "ended": None, "versions": {}}
    stray = []
    prefix = nonce.encode() + b" "
    for line in stdout.split(b"\n"):
        if not line:
            continue
        if not line.startswith(prefix):
            stray.append(line)
            continue
        try:
            event = json.loads(line[len(prefix) :])
        except ValueError:
            stray.append(line)
            continue
        _take(report, facts, event)
    return replace(report, stray=b"\n".join(stray)[:4000], **facts)


def _take(report: Report, facts: dict[str, Any], event: dict[str, Any]) -> None:
    session = str(event.get("session", ""))
    match event.get("event"):
        case "hello":
            facts["started"] = True
            facts["versions"] = {"python": str(event["python"]), "pytest": str(event["pytest"])}
        case "start":
            report.sessions[session] = None
        case "collected":
            report.collected[session] = len(event["ids"])
        case "collect_error":
            report.errors[str(event["id"])] = str(event["text"])
        case "test":
            name = str(event["id"])
            report.tests[name] = worst([str(event["result"]), report.tests.get(name, PASSED)])
            report.reported[session] = report.reported.get(session, 0) + 1
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


def doubts(report: Report, result: ExecResult, controls: Iterable[str]) -> list[str]:
    """Reasons not to believe a run: each is something that an honest run cannot show. `controls` are the files of
    control tests, whose results are taken out of the report here."""
    found = []
    if report.stray:
        found.append("something else wrote to the result channel")
    if report.broken:
        found.append(f"the test runner was changed while it ran: {report.broken[0]}")
    if report.ended is None:
        found.append("the run ended before the test runner did")
    elif result.exit_code != report.ended:
        found.append(f"the runner ended with status {report.ended}, but its process with {result.exit_code}")
    for session, status in report.sessions.items():
        if status is None:
            found.append(f"the test session {session} did not finish")
        elif report.collected.get(session, 0) != report.reported.get(session, 0):
            found.append(f"the session {session} collected {report.collected.get(session, 0)} tests, "
                         f"but {report.reported.get(session, 0)} reported")  # fmt: skip
    for file in controls:
        mine = {name: outcome for name, outcome in report.tests.items() if _is_in(name, file)}
        for control, must_pass in CONTROL_TESTS.items():
            if not must_pass and not any(name.endswith(f"_{_CONTROL}_{control}") for name in mine):
                found.append(f"the control test {control!r}, which must fail, is missing")
        for name, outcome in mine.items():
            if outcome not in (FAILED, ERROR) and not name.endswith(f"_{_CONTROL}_holds"):
                found.append(f"the control test {name!r}, which must fail, is reported as {outcome}")
    return list(dict.fromkeys(found))


def without_controls(report: Report, controls: Iterable[str]) -> dict[str, str]:
    """The results of the task's own tests."""
    files = list(controls)
    return {name: result for name, result in report.tests.items() if not any(_is_in(name, file) for file in files)}


def _is_in(name: str, file: str) -> bool:
    return name.partition("::")[0].rpartition("/")[2] == file.rpartition("/")[2]
