"""The sandbox of a grading: booted without network, given our programs, prepared, and patched."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from sandlot.errors import GradingError
from sandlot.grading import runtime
from sandlot.grading.bench import WORKER, Bench
from sandlot.sandbox import Sandbox, SandboxBackend, SandboxSpec
from sandlot.tasks.rows import test_checkouts
from sandlot.tasks.task import PytestGrading, R2EGrading, SweProGrading, Task
from sandlot.workspace import Patch, apply_patch, prepare
from sandlot.workspace.apply import File, tar_of
from sandlot.workspace.prepare import hidden_files_at
from sandlot.workspace.snapshot import spool


def bench_spec(task: Task, spec: SandboxSpec | None) -> SandboxSpec:
    """What the grading sandbox boots: the task's image without network, with pytest where it lacks it. Blocking."""
    base = spec or SandboxSpec()
    image = task.image
    mounted = {layer.mount_point for layer in base.layers}
    own = runtime.runtime_layers(image)
    return replace(
        base,
        image=image,
        workdir=task.workdir,
        network="off",
        snapshot=None,
        layers=(*base.layers, *(layer for layer in own if layer.mount_point not in mounted)),
        env={**base.env, **runtime.runtime_env(image)},
        labels={**base.labels, "phase": "grade", "task": task.id},
    )


@asynccontextmanager
async def opened(
    task: Task, patch: Patch | bytes, backend: SandboxBackend, spec: SandboxSpec | None, evidence: dict[str, Any]
) -> AsyncIterator[Bench]:
    """A fresh sandbox with the task's workspace and the patch applied."""
    boot = await asyncio.to_thread(bench_spec, task, spec)
    async with await backend.create(boot) as sandbox:
        evidence["sandbox"] = dict(sandbox.facts)
        await asyncio.gather(sandbox.upload_tar(WORKER, _worker(), user="root"), _let_git_trust(sandbox))
        checked_out = await _checked_out(sandbox, task)
        prepared = await prepare(sandbox, task)
        evidence["base_commit"], evidence["base_tree"] = prepared.base_commit, prepared.base_tree
        applied = await apply_patch(sandbox, patch, prepared, workdir=task.workdir, exact=not task.setup)
        evidence["applied"] = {
            "ok": applied.ok,
            "tree": applied.tree,
            "reason": applied.reason,
            "files": [change.path.decode("utf-8", "backslashreplace") for change in applied.changes],
            "skipped": list(applied.skipped),
        }
        if not applied.ok:
            raise GradingError(applied.reason)
        yield Bench(task, sandbox, prepared, applied, evidence, checked_out)


_OLD_GIT = """
case $(git version 2>/dev/null) in
    "git version 1."*|"git version 2."[0-9].*|"git version 2."[12][0-9].*|"git version 2."3[0-7].*)
        git config --system --add safe.directory "*" ;;
esac
"""


async def _let_git_trust(sandbox: Sandbox) -> None:
    """Git before 2.38 takes the directories to trust from files alone: from one of root's, before the patch is there.

    Tests that call git find a workdir that is another user's; newer ones are told by the environment.
    """
    done = await sandbox.exec(["/bin/sh", "-c", _OLD_GIT], user="root", cwd="/", timeout=60)
    if not done.ok:
        raise GradingError(f"git could not be told to trust the workdir: {done.text()[-500:].strip()}")


@cache
def _worker() -> bytes:
    """Our programs for the sandbox, as a tar."""
    programs = Path(__file__).with_name("worker").glob("*.py")
    return tar_of({file.name.encode(): File("100644", file.read_bytes()) for file in sorted(programs)})


async def _checked_out(sandbox: Sandbox, task: Task) -> dict[str, bytes]:
    """Test files that are there only before the workspace is prepared: of another revision (`before_repo_set_cmd`), of
    the base before the task's mutation, or of the image."""
    grading = task.grading
    if isinstance(grading, PytestGrading) and grading.base_files:
        return await hidden_files_at(sandbox, task, "", grading.base_files)
    if isinstance(grading, R2EGrading) and grading.image_tests:
        return await _tests_of_image(sandbox, grading.image_tests)
    files: dict[str, bytes] = {}
    if isinstance(grading, SweProGrading):
        for revision, paths in test_checkouts(grading.before_repo_set_cmd):
            wanted = tuple(path for path in paths if path not in grading.files)
            files.update(await hidden_files_at(sandbox, task, revision, wanted))
    return files


async def _tests_of_image(sandbox: Sandbox, directory: str) -> dict[str, bytes]:
    """The regular files of a directory of the image, by their place in the workdir's `r2e_tests`."""
    files: dict[str, bytes] = {}
    stream = sandbox.download_tar(directory, exclude_names=("__pycache__",))
    with await spool(stream) as tar, tarfile.open(fileobj=tar, mode="r:") as archive:
        for member in archive:
            if (file := archive.extractfile(member) if member.isreg() else None) is not None:
                files[f"r2e_tests/{PurePosixPath(member.name)}"] = file.read()
    if not files:
        raise GradingError(f"the image holds no test in {directory}")
    return files
