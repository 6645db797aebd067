"""Grade one patch: a fresh sandbox, the task's own grader, a verdict with its evidence."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol

from sandlot.errors import FailureKind, SandlotError
from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.countercheck import counterchecked
from sandlot.grading.flaky import repeated
from sandlot.grading.opening import opened
from sandlot.grading.verdict import Verdict
from sandlot.registry import Registry
from sandlot.sandbox import SandboxBackend, SandboxSpec
from sandlot.tasks.convert import FORMS
from sandlot.tasks.task import GradingOptions, Task
from sandlot.workspace import Patch

GRADERS = Registry(
    "sandlot.graders",
    {
        "pytest": "sandlot.grading.named_tests:grade_pytest",
        "command": "sandlot.grading.command:grade_command",
        "script": "sandlot.grading.script:grade_script",
        "swepro": "sandlot.grading.swepro:grade_swepro",
        "swebench": "sandlot.grading.swebench:grade_swebench",
        "r2e": "sandlot.grading.r2e:grade_r2e",
        "harbor": "sandlot.grading.harbor:grade_harbor",
    },
)
"""Graders by the name of the grading form. An outside form's class says its name in an attribute `form`."""

_FORMS = {kind: name for name, kind in FORMS.items()}
_PATCH_SHOWN = 256 << 10


class Grader(Protocol):
    """Grades what is on the bench. Raises `GradingError` when no verdict can be reached."""

    async def __call__(self, bench: Bench) -> Verdict: ...


async def grade(
    task: Task,
    patch: Patch | bytes,
    backend: SandboxBackend,
    *,
    spec: SandboxSpec | None = None,
    options: GradingOptions | None = None,
) -> Verdict:
    """Grade `patch` for `task` in a fresh sandbox of `backend` without network.

    Never raises for what happens while grading: when there is no verdict the result is ungraded and carries the kind
    of failure. An empty patch is graded like any other. A patch that does not apply is ungraded too, since nothing was
    tested. `spec` gives limits and further layers; image, workdir, network and test runtime are the grader's own.
    `options` win over the task's own.
    """
    if options is not None:
        task = replace(task, options=options)
    if task.options.timeout is not None:
        task = replace(task, grading=replace(task.grading, timeout=task.options.timeout))
    return await repeated(lambda: _proven(task, patch, backend, spec), task.options.reruns)


async def _proven(task: Task, patch: Patch | bytes, backend: SandboxBackend, spec: SandboxSpec | None) -> Verdict:
    """Grade, and countercheck what earned something."""
    tests: dict[str, bytes] = {}
    verdict = await _grade(task, patch, backend, spec, tests)
    if not verdict.reward or not task.options.countercheck:
        return verdict

    async def run(other: bytes | None, instead: Mapping[str, bytes]) -> Verdict:
        return await _grade(task, patch if other is None else other, backend, spec, {}, instead)

    try:
        return await counterchecked(task, verdict, tests, run)
    except Exception as error:
        evidence = {**verdict.evidence, "traceback": traceback.format_exc()}
        return Verdict(None, FailureKind.GRADER_ERROR, f"the countercheck failed: {error!r}", evidence=evidence)


async def _grade(
    task: Task,
    patch: Patch | bytes,
    backend: SandboxBackend,
    spec: SandboxSpec | None,
    tests: dict[str, bytes],
    instead: Mapping[str, bytes] = MappingProxyType({}),
) -> Verdict:
    """One grading. `tests` is told the hidden tests; `instead` are other contents for them."""
    diff = patch.diff if isinstance(patch, Patch) else patch
    evidence: dict[str, Any] = {
        "patch": diff[:_PATCH_SHOWN].decode("utf-8", "backslashreplace"),
        "patch_bytes": len(diff),
        "patch_sha256": hashlib.sha256(diff).hexdigest(),
        "patch_omitted": list(patch.omitted) if isinstance(patch, Patch) else [],
    }
    form = _FORMS.get(type(task.grading)) or str(getattr(task.grading, "form", type(task.grading).__name__))
    evidence["form"], evidence["options"] = form, asdict(task.options)
    verdict: Verdict | None = None
    unexplained: NothingReportedError | None = None
    try:
        grader: Grader = GRADERS.get(form)
        async with opened(task, patch, backend, spec, evidence) as bench:
            bench.tests, bench.instead = tests, instead
            try:
                verdict = await grader(bench)
            except NothingReportedError as error:
                unexplained = error
        if unexplained is not None:
            verdict = await _compared_with_base(task, diff, backend, spec, evidence, unexplained)
    except Exception as error:
        if verdict is not None:  # it was reached; only clearing away failed
            evidence["teardown"] = f"{type(error).__name__}: {error}"
            return verdict
        if isinstance(error, SandlotError):
            return Verdict(None, error.kind, str(error), evidence=evidence)
        evidence["traceback"] = traceback.format_exc()
        return Verdict(None, FailureKind.GRADER_ERROR, f"{type(error).__name__}: {error}", evidence=evidence)
    assert verdict is not None
    return verdict


async def _compared_with_base(
    task: Task,
    diff: bytes,
    backend: SandboxBackend,
    spec: SandboxSpec | None,
    evidence: dict[str, Any],
    error: NothingReportedError,
) -> Verdict:
    """A run that told of no test is the patch's doing if the base without a patch does tell; else it is ungraded."""
    if not diff.strip():
        raise error
    base = await _grade(task, b"", backend, spec, {})
    evidence["base"] = {"reward": base.reward, "detail": base.detail, "reported": base.evidence.get("reported", 0)}
    if base.reward is None or not base.evidence.get("reported"):
        raise error
    return Verdict(0.0, detail=f"{error}; the base without the patch is graded", evidence=evidence)
