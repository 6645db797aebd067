"""Prove that a task can be trained on: its solution earns 1, nothing earns 0, and cheats earn nothing."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandlot.errors import GradingError, SandlotError
from sandlot.grading.cheats import CHEATS, Files, View, is_test_path
from sandlot.grading.grade import grade
from sandlot.grading.opening import bench_spec
from sandlot.grading.verdict import Verdict
from sandlot.sandbox import SandboxBackend
from sandlot.tasks.task import GradingOptions, HarborGrading, R2EGrading, Task
from sandlot.workspace import Prepared, capture, prepare
from sandlot.workspace.git import Entry, Store
from sandlot.workspace.repository import built

_MODULES = 20
"""Modules that a cheat touches at most."""


@dataclass(frozen=True)
class Checked:
    """What was found of one task. Rewards are None where grading came to no verdict; `cheats` has one per cheat.

    `faults` is empty for a task that can be trained on.
    """

    task: str
    gold: float | None = None
    again: float | None = None
    empty: float | None = None
    cheats: Mapping[str, float | None] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.faults

    def as_row(self) -> dict[str, Any]:
        """The facts for JSON."""
        facts = {"task": self.task, "ok": self.ok, "gold": self.gold, "again": self.again, "empty": self.empty}
        return {**facts, "cheats": dict(self.cheats), "faults": list(self.faults)}


async def check_tasks(
    tasks: Sequence[Task],
    backend: SandboxBackend,
    *,
    jobs: int = 2,
    cheats: Collection[str] = CHEATS.keys(),
    done: Callable[[Checked], None] = lambda checked: None,
) -> list[Checked]:
    """Check tasks, at most `jobs` gradings at once; `done` is told of each as it is finished."""
    slots, rows = asyncio.Semaphore(jobs), asyncio.Semaphore(jobs)

    async def one(task: Task) -> Checked:
        async with rows:
            checked = await check_task(task, backend, slots=slots, cheats=cheats)
        done(checked)
        return checked

    return list(await asyncio.gather(*(one(task) for task in tasks)))


async def check_task(
    task: Task,
    backend: SandboxBackend,
    *,
    slots: asyncio.Semaphore | None = None,
    cheats: Collection[str] = CHEATS.keys(),
) -> Checked:
    """Grade the solution twice, the empty patch, and (where these are right) those of `cheats` that fit the task."""
    slots = slots or asyncio.Semaphore(1)

    async def graded(patch: bytes, options: GradingOptions | None = None) -> Verdict:
        async with slots:
            return await grade(task, patch, backend, options=options)

    try:
        async with slots:
            gold = await solution(task, backend)
    except SandlotError as error:
        return Checked(task.id, faults=(str(error),))
    once = replace(task.options, countercheck=False)
    first, again, empty = await asyncio.gather(graded(gold), graded(gold, once), graded(b""))
    faults = []
    if first.reward != 1:
        faults.append(f"the solution earns {_shown(first)}")
    if (first.reward, dict(first.tests)) != (again.reward, dict(again.tests)):
        faults.append(f"the solution was graded {_shown(first)} and then {_shown(again)}")
    if empty.reward != 0:
        faults.append(f"the empty patch earns {_shown(empty)}")
    found: dict[str, float | None] = {}
    if cheats and not faults:
        try:
            async with slots:
                patches = await cheat_patches(task, gold, backend, cheats)
        except SandlotError as error:
            return Checked(task.id, first.reward, again.reward, empty.reward, {}, (str(error),))
        for name, verdict in zip(patches, await asyncio.gather(*map(graded, patches.values())), strict=True):
            found[name] = verdict.reward
            if verdict.reward != 0:
                faults.append(f"the cheat {name} earns {_shown(verdict)}")
    return Checked(task.id, first.reward, again.reward, empty.reward, found, tuple(faults))


def _shown(verdict: Verdict) -> str:
    value = "no verdict" if verdict.reward is None else f"{verdict.reward:g}"
    return f"{value} ({verdict.detail})" if verdict.detail else value


async def solution(task: Task, backend: SandboxBackend) -> bytes:
    """The task's known solution: its patch, or what its solution script leaves behind. `GradingError` without one."""
    if task.gold_patch is not None:
        return task.gold_patch
    place = str(task.metadata.get("solution") or "") if isinstance(task.grading, HarborGrading) else ""
    if not place:
        raise GradingError(f"task {task.id} has no known solution, so nothing can be proven")
    spec = await asyncio.to_thread(bench_spec, task, None)
    async with await backend.create(spec) as sandbox:
        prepared = await prepare(sandbox, task)
        await sandbox.upload_tar("/solution", await asyncio.to_thread(_tar_of, Path(place)), user="root")
        ran = await sandbox.exec(["bash", "/solution/solve.sh"], user="root", cwd=task.workdir, timeout=1800)
        if not ran.ok:
            raise GradingError(f"the solution script of task {task.id} failed: {ran.text()[-500:].strip()}")
        return (await capture(sandbox, prepared, workdir=task.workdir)).diff


def _tar_of(directory: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(directory, arcname=".")
    return buffer.getvalue()


async def cheat_patches(
    task: Task, gold: bytes, backend: SandboxBackend, cheats: Collection[str] = CHEATS.keys()
) -> dict[str, bytes]:
    """Those of the built-in `cheats` that fit the task, as patches."""
    prepared = await workspace(task, backend)
    return await asyncio.to_thread(_cheat_patches, task, gold, prepared, cheats)


async def workspace(task: Task, backend: SandboxBackend) -> Prepared:
    """The task's workspace as the agent finds it, from the trusted side where no sandbox is needed."""
    if task.repository is not None and not task.setup:
        made = await asyncio.to_thread(built, task.repository, task.mutation)
        return Prepared(made.commit, made.tree, made.store.entries(made.tree), made.store)
    spec = await asyncio.to_thread(bench_spec, task, None)
    async with await backend.create(spec) as sandbox:
        return await prepare(sandbox, task)


def _cheat_patches(task: Task, gold: bytes, prepared: Prepared, cheats: Collection[str]) -> dict[str, bytes]:
    view = view_of(task, gold, prepared)
    patches = {}
    for name in cheats:
        if (files := CHEATS[name](view)) is not None and (patch := patch_of_files(prepared, files)):
            patches[name] = patch
    return patches


def view_of(task: Task, gold: bytes, prepared: Prepared) -> View:
    """What the cheats get to know of a task. Blocking."""
    grading = task.grading
    names = tuple(getattr(grading, "fail_to_pass", ())) + tuple(getattr(grading, "pass_to_pass", ()))
    if isinstance(grading, R2EGrading):
        names = tuple(grading.expected)
    paths = [path.decode() for path, entry in prepared.entries.items() if entry.mode != "120000" and _is_text(path)]
    tests = [path for path in paths if is_test_path(path)]
    changed = {line[6:].split("\t")[0] for line in gold.decode("utf-8", "replace").splitlines() if line[:6] == "+++ b/"}
    modules = [path for path in paths if path.endswith(".py") and path in changed and path not in tests]
    modules = modules or [path for path in paths if path.endswith("__init__.py") and path not in tests]

    def contents(wanted: list[str]) -> dict[str, bytes]:
        blobs = prepared.store.blobs([prepared.entries[path.encode()].blob for path in wanted])
        return dict(zip(wanted, blobs, strict=True))

    return View(names, contents(tests), contents(modules[:_MODULES]))


def _is_text(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return True


def patch_of_files(prepared: Prepared, files: Files) -> bytes:
    """The patch that sets files of the base; what stands in the way of one is left alone. Blocking."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "store", alternate=prepared.store)
        entries = dict(prepared.entries)
        for name, content in files.items():
            path = name.encode()
            if content is None:
                entries.pop(path, None)
                continue
            old = entries.get(path)
            blob = store.git("hash-object", "-w", "--stdin", stdin=content).decode().strip()
            entries[path] = Entry(old.mode if old else "100644", blob)
        tree = store.write_tree(entries, Path(scratch) / "index")
        return store.diff(prepared.base_tree, tree)
