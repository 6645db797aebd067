"""Apply a patch to a prepared workspace: forward, whole or not at all, judged by the tree that results."""

from __future__ import annotations

import asyncio
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sandlot.errors import SandboxError
from sandlot.sandbox import AGENT_USER, Sandbox
from sandlot.workspace.git import Change, GitError, Store
from sandlot.workspace.patch import Patch
from sandlot.workspace.prepare import GIT_NAMES, Prepared
from sandlot.workspace.snapshot import ignored, read_tar, spool


@dataclass(frozen=True)
class File:
    """What to write at a path: git's mode and the content (of a link: its target)."""

    mode: str
    content: bytes


@dataclass(frozen=True)
class Applied:
    """What became of a patch. `ok` is false when nothing was applied, and `reason` says why.

    `tree` is the tree that the workdir has now, proven by reading it back. `changes` are its differences to the base
    and `contents` the blobs on their new side by id. `skipped` are those parts of a foreign patch that name a binary
    change without its data, which nobody can apply.
    """

    ok: bool
    tree: str
    reason: str = ""
    changes: tuple[Change, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Planned:
    tree: str
    changes: list[Change]
    contents: dict[str, bytes]
    skipped: tuple[str, ...]


async def apply_patch(
    sandbox: Sandbox, patch: Patch | bytes, prepared: Prepared, *, workdir: str, exact: bool = True
) -> Applied:
    """Apply `patch` to the workdir of a sandbox that was just prepared.

    The patch is applied on the trusted side to the base tree first: forward only, without fuzz, all or nothing. With a
    `Patch` the result must be the tree it was captured from (unless `exact` is false: set-up commands that do not give
    the same files twice). Only then the changed files are written, and the workdir is read back and must be that tree.
    """
    try:
        planned = await asyncio.to_thread(_plan, patch, prepared, exact)
    except GitError as error:
        reason = (
            f"the patch does not apply to the base tree: {error.stderr.decode('utf-8', 'replace').strip() or error}"
        )
        return Applied(False, prepared.base_tree, reason)
    files = {c.path: File(c.new.mode, planned.contents[c.new.blob]) if c.new else None for c in planned.changes}
    await write_files(sandbox, files, workdir=workdir)
    with await spool(sandbox.download_tar(workdir, exclude_names=GIT_NAMES)) as tar:
        tree = await asyncio.to_thread(tree_of_tar, tar, prepared, planned)
    if tree != planned.tree:
        raise SandboxError(f"the workdir has the tree {tree} after writing the patch, not {planned.tree}")
    return Applied(True, tree, "", tuple(planned.changes), planned.contents, planned.skipped)


async def write_files(
    sandbox: Sandbox, files: Mapping[bytes, File | None], *, workdir: str, user: str = AGENT_USER
) -> None:
    """Put files (or, with None, nothing) at paths of the workdir, whatever is there now; directories left empty go."""
    if not files:
        return
    gone = b"".join(b"./" + path + b"\0" for path in files)
    removed = await sandbox.exec("xargs -0 rm -rf --", user="root", cwd=workdir, stdin=gone, timeout=600)
    if not removed.ok:
        raise SandboxError(f"files in {workdir} could not be removed: {removed.text()[-1000:]}")
    parents = {path.rpartition(b"/")[0] for path, file in files.items() if file is None and b"/" in path}
    if parents:
        # `rmdir -p` ends with an error at `.` or at a directory that is still needed: as it should.
        emptied = b"".join(b"./" + parent + b"\0" for parent in sorted(parents, reverse=True))
        await sandbox.exec(
            "xargs -0 -n 1 rmdir -p -- 2>/dev/null", user="root", cwd=workdir, stdin=emptied, timeout=600
        )
    if new := {path: file for path, file in files.items() if file is not None}:
        await sandbox.upload_tar(workdir, tar_of(new), user=user)


def tree_of_tar(tar: IO[bytes], prepared: Prepared, planned: _Planned | None = None) -> str:
    """The tree of a workdir: what the base (or the patch) has, and what is not ignored. Blocking."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "store", alternate=prepared.store)
        found = read_tar(store, tar, prepared.entries, only=lambda path: False)
        expected = {*prepared.entries, *(change.path for change in (planned.changes if planned else []))}
        left_out = ignored(prepared.store, prepared.entries, [path for path in found if path not in expected])
        kept = {path: entry for path, entry in found.items() if path not in left_out}
        return store.write_tree(kept, Path(scratch) / "index")


def apply_to_tree(store: Store, base_tree: str, diff: bytes, index: Path) -> str:
    """The tree that `diff` makes of `base_tree`; `GitError` when any part of it does not fit. Blocking."""
    tracked = store.with_index(index)
    tracked.git("read-tree", base_tree)
    if diff.strip():
        tracked.git("apply", "--cached", "--binary", "--whitespace=nowarn", "-", stdin=diff)
    return tracked.git("write-tree").decode().strip()


def _plan(patch: Patch | bytes, prepared: Prepared, exact: bool) -> _Planned:
    diff, skipped = (patch.diff, ()) if isinstance(patch, Patch) else without_stubs(patch)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "store", alternate=prepared.store)
        tree = apply_to_tree(store, prepared.base_tree, diff, Path(scratch) / "index")
        if isinstance(patch, Patch) and exact and tree != patch.tree:
            raise GitError(f"it gives the tree {tree}, but it was captured from {patch.tree}")
        changes = store.changes(prepared.base_tree, tree)
        if links := [c.path for c in changes if c.new is not None and c.new.mode == "160000"]:
            raise GitError(f"it moves the submodule {os.fsdecode(links[0])}, whose commits are not here")
        blobs = list({change.new.blob: None for change in changes if change.new is not None})
        return _Planned(tree, changes, dict(zip(blobs, store.blobs(blobs), strict=True)), skipped)


_SECTION = re.compile(rb"^diff --git ", re.MULTILINE)
_STUB = re.compile(rb"^Binary files (.+) differ\r?$", re.MULTILINE)


def without_stubs(diff: bytes) -> tuple[bytes, tuple[str, ...]]:
    """A foreign patch without its binary stubs ("Binary files … differ" with no data), and what they were.

    One stub makes git refuse the whole patch, the text changes too, though it says nothing that could be applied.
    """
    starts = [match.start() for match in _SECTION.finditer(diff)]
    if not starts:
        return diff, ()
    kept, skipped = [diff[: starts[0]]], []
    for start, end in zip(starts, [*starts[1:], len(diff)], strict=True):
        section = diff[start:end]
        stub = _STUB.search(section) if b"\n@@ " not in section and b"\nGIT binary patch" not in section else None
        if stub:
            skipped.append(stub[1].decode("utf-8", "replace"))
        else:
            kept.append(section)
    return b"".join(kept), tuple(skipped)


def tar_of(files: Mapping[bytes, File]) -> bytes:
    """A tar of files and links with git's modes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for path, file in files.items():
            member = tarfile.TarInfo(os.fsdecode(path))
            if file.mode == "120000":
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.fsdecode(file.content), 0o777
                tar.addfile(member)
                continue
            member.size, member.mode = len(file.content), 0o755 if file.mode == "100755" else 0o644
            tar.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()
