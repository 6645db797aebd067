"""The sandbox in which one patch is graded: given the hidden tests, and what runs them."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from sandlot.errors import GradingError, SandboxError, SandboxLostError
from sandlot.grading import runtime
from sandlot.grading.protect import reverted, test_roots
from sandlot.grading.witness import Report, control_source, doubts, read_report
from sandlot.sandbox import AGENT_USER, ExecResult, Sandbox
from sandlot.tasks.task import Task
from sandlot.workspace import Prepared
from sandlot.workspace.apply import Applied, File, write_files
from sandlot.workspace.git import Change

WORKER = "/opt/sandlot/grading"


class NothingReportedError(GradingError):
    """A run told nothing of any test. Whose doing that is shows the same run of the base without a patch."""


_CONTROL_TIMEOUT = 60.0
_LOG_TAIL = 64 << 10


_LOCK_TREES = """set -e
for root; do
    [ -d "$root" ] || continue
    chown -Rh root: "./$root"
    find "./$root" -type d -exec chmod 1777 {} +
done
find . -name conftest.py -exec chown -h root: {} +
"""
_LOCK_DIRECTORIES = """set -e
for directory; do
    [ -d "$directory" ] || continue
    chown -h root: "./$directory"
    chmod 1777 "./$directory"
done
"""


@dataclass
class Bench:
    """Everything a grader needs. `evidence` is what the verdict will show; graders add to it.

    `checked_out` are test files that the task takes from a later revision, read before that was removed; `hidden` what
    was put into the workdir. `tests` are the contents of hidden tests, wherever they go, and `instead` others that
    take their place.
    """

    task: Task
    sandbox: Sandbox
    prepared: Prepared
    applied: Applied
    evidence: dict[str, Any] = field(default_factory=dict)
    checked_out: Mapping[str, bytes] = field(default_factory=dict)
    hidden: dict[str, bytes] = field(default_factory=dict)
    tests: dict[str, bytes] = field(default_factory=dict)
    instead: Mapping[str, bytes] = field(default_factory=dict)

    def test(self, path: str, content: bytes) -> bytes:
        """What a hidden test file is to hold."""
        self.tests[path] = content
        return self.instead.get(path, content)

    async def put_hidden(
        self, files: Mapping[str, bytes | None], tests: Iterable[str] = (), *, lock: bool = True
    ) -> None:
        """Take back what the patch may not decide, then put the hidden `files` in, owned by root; None takes one out.

        `tests` are other paths of the repository that are tests too. With `lock` the directories above hidden files and
        the test directories become root's, with the sticky bit: code under test may add files there, but not replace
        what is there. Where the sandbox has one user only that cannot be done, and `changed_tests` alone tells.
        """
        files = {path: None if data is None else self.test(path, data) for path, data in files.items()}
        hidden = [*files, *tests]
        old = {change.path: change.old for change in self.applied.changes if change.old is not None}
        blobs = await asyncio.to_thread(lambda: list(self.prepared.store.blobs([entry.blob for entry in old.values()])))
        old_content = dict(zip(old, blobs, strict=True))

        def contents(change: Change) -> tuple[bytes | None, bytes | None]:
            new = None if change.new is None else self.applied.contents[change.new.blob]
            return old_content.get(change.path), new

        back = await asyncio.to_thread(
            reverted, self.applied.changes, hidden=hidden, patterns=self.task.protected, contents=contents
        )
        self.evidence["reverted"] = [change.path.decode("utf-8", "backslashreplace") for change in back]
        # What the patch added goes first, so that nothing of it stands in the way of what returns.
        for added in (True, False):
            await write_files(
                self.sandbox,
                {
                    c.path: File(c.old.mode, old_content[c.path]) if c.old else None
                    for c in back
                    if (not c.old) is added
                },
                workdir=self.task.workdir,
            )
        put = {path.encode(): None if data is None else File("100644", data) for path, data in files.items()}
        await write_files(self.sandbox, put, workdir=self.task.workdir, user="root")
        self.evidence["hidden"] = list(files)
        self.hidden.update({path: data for path, data in files.items() if data is not None})
        if lock and self.sandbox.facts.get("users") != "single":
            await self._lock(hidden)

    async def _lock(self, hidden: list[str]) -> None:
        directories = {str(parent) for path in hidden for parent in PurePosixPath(path).parents} | {"."}
        for script, paths in ((_LOCK_TREES, test_roots(hidden)), (_LOCK_DIRECTORIES, directories)):
            locked = await self.sandbox.exec(
                ["/bin/sh", "-c", script, "sh", *sorted(paths)], user="root", cwd=self.task.workdir, timeout=600
            )
            if not locked.ok:
                raise GradingError(f"the hidden tests could not be locked: {locked.text()[-1000:]}")

    async def put_controls(self, directories: Iterable[str], names: Iterable[str]) -> list[str]:
        """Put one file of control tests into each directory, under a name nobody knows; their paths."""
        source = control_source(names)
        controls = [str(PurePosixPath(directory) / f"test_{secrets.token_hex(6)}.py") for directory in directories]
        files: dict[bytes, File | None] = {path.encode(): File("100644", source) for path in controls}
        await write_files(self.sandbox, files, workdir=self.task.workdir, user="root")
        self.hidden.update(dict.fromkeys(controls, source))
        return controls

    async def changed_tests(self) -> list[str]:
        """Kill what still runs; the hidden files and control tests that are not there any more as they were put in."""
        await self.sandbox.kill_processes()
        changed = []
        for path, content in self.hidden.items():
            try:
                found = await self.sandbox.read_file(f"{self.task.workdir}/{path}", max_bytes=len(content) + 1)
            except SandboxLostError:
                raise
            except (OSError, SandboxError):
                found = None
            if found != content:
                changed.append(path)
        return changed

    async def work(
        self,
        mode: str,
        *,
        controls: list[str],
        timeout: float,
        label: str = "tests",
        user: str = AGENT_USER,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> tuple[Report, ExecResult]:
        """Run the worker, and by it the tests as the agent user (or another). Its report, and how its process ended;
        both go into the evidence."""
        nonce = secrets.token_hex(16)
        order: dict[str, Any] = {
            "mode": mode,
            "nonce": nonce,
            "user": user,
            "workdir": self.task.workdir,
            "controls": controls,
            "libraries": runtime.libraries(self.task.image),
            **more,
        }
        result = await self.sandbox.exec(
            [self.task.python or runtime.interpreter(self.task.image), "-I", "-S", f"{WORKER}/run.py"],
            user="root",
            cwd="/",
            env={**_git_trusts_the_workdir(), **(env or {})},
            stdin=json.dumps(order).encode(),
            timeout=timeout,
        )
        report = read_report(result.stdout, nonce)
        self.evidence.setdefault("runs", []).append(
            {
                "label": label,
                "mode": mode,
                "order": {key: value for key, value in more.items() if key in ("files", "argv", "script")},
                "exit_code": result.exit_code,
                "timed_out": result.timed_out,
                "out_of_memory": result.out_of_memory,
                "truncated": result.truncated,
                "duration": result.duration,
                "log": result.stderr[-_LOG_TAIL:].decode("utf-8", "replace"),
                "texts": report.texts,
                "collect_errors": report.errors,
                "versions": dict(report.versions),
                "stray": report.stray,
            }
        )
        if not report.started:
            said = result.stderr[-500:].decode("utf-8", "replace").strip() or "no output"
            raise GradingError(f"the test runner did not start ({said})")
        return report, result

    async def fault_of(
        self, report: Report, result: ExecResult, controls: Iterable[str], timeout: float, what: str
    ) -> str:
        """Why a run between control tests earns nothing as a whole, or nothing; `what` is what ran.

        One that broke off (time limit, memory limit, a process that ended early) after the runner had started is the
        patch's doing if the control tests still run in the same sandbox; if not, the base without the patch tells.
        """
        found = doubts(report, result, controls)
        found += [f"{path} was changed while the tests ran" for path in await self.changed_tests()]
        self.evidence["doubts"], self.evidence["reported"] = found, len(report.tests)
        if result.timed_out or result.out_of_memory or report.ended is None:
            await self.runner_works()
        elif not report.tests:
            raise NothingReportedError(f"no test was reported: {found[0]}")
        if result.timed_out:
            return f"{what} did not end within {timeout:g} s"
        if result.out_of_memory:
            return f"{what} used more memory than the sandbox has"
        return f"the test run cannot be believed: {found[0]}" if found else ""

    async def runner_works(self, *, pytest: bool = True) -> None:
        """After a run that broke off: the control tests alone (or, without pytest, a command) must still run here.

        Where they do not, the code under test may have seen to that: `NothingReportedError`, so that the base tells.
        """
        await self.sandbox.kill_processes()
        try:
            fault = await (self._control_fault() if pytest else self._command_fault())
        except SandboxLostError:
            raise
        except (SandboxError, GradingError) as error:  # a full disk is one
            fault = str(error)
        if fault:
            raise NothingReportedError(f"nothing can be run in the sandbox after the tests: {fault}")

    async def _command_fault(self) -> str:
        done = await self.sandbox.exec(["true"])
        return "" if done.ok else done.text()[-500:].strip() or f"exit {done.exit_code}"

    async def _control_fault(self) -> str:
        """Why control tests do not run where the code under test could leave nothing, or nothing."""
        place, name = f"{WORKER}-{secrets.token_hex(6)}", f"test_{secrets.token_hex(6)}.py"
        await self.sandbox.write_file(f"{place}/{name}", control_source(()), user="root")
        bench = replace(self, task=replace(self.task, workdir=place), hidden={})
        report, result = await bench.work(
            "pytest", controls=[name], timeout=_CONTROL_TIMEOUT, label="control", required=[], files=[name]
        )
        return next(iter(doubts(report, result, [name])), "")


def _git_trusts_the_workdir() -> dict[str, str]:
    """Tests that call git find a workdir that is root's; git would refuse it without this."""
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
