"""Capture what the agent did as a patch, whatever it did with git."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import IO

from sandlot.errors import CaptureError, SandboxError
from sandlot.sandbox import Sandbox
from sandlot.workspace.git import Entry, Store
from sandlot.workspace.patch import Patch
from sandlot.workspace.prepare import GIT_NAMES, Prepared
from sandlot.workspace.snapshot import FILE_LIMIT, ignored, read_tar, spool

PATCH_LIMIT = 16 << 20
"""Default cap of a patch in bytes."""
_BINARY_PROBE = 8000
"""Git calls a file binary that has a NUL in its first bytes, this many."""


async def capture(sandbox: Sandbox, prepared: Prepared, *, workdir: str, max_bytes: int = PATCH_LIMIT) -> Patch:
    """Kill what still runs in `sandbox` and return the difference of its files to the prepared base.

    The files are streamed out by the sandbox's own code and compared on the trusted side with a git that has nobody's
    configuration: HEAD, index, branches, stash, hooks, attributes, filters and settings of the agent's repository are
    never read, and repositories inside are plain files. Files that the base does not have and that its ignore rules
    (or `IGNORED_ALWAYS`) name are left out. Call it when the session is sealed, so that nothing more is sampled.
    `CaptureError` is the agent's own doing.
    """
    await sandbox.kill_processes()
    try:
        tar = await spool(sandbox.download_tar(workdir, exclude_names=GIT_NAMES))
    except (FileNotFoundError, SandboxError) as error:
        if isinstance(error, SandboxError) and error.retryable:
            raise
        raise CaptureError(f"the agent's files in {workdir} could not be captured: {error}") from error
    with tar:
        return await asyncio.to_thread(patch_of_tar, tar, prepared, max_bytes)


def patch_of_tar(tar: IO[bytes], prepared: Prepared, max_bytes: int = PATCH_LIMIT) -> Patch:
    """The patch from the prepared base to the files in `tar`.

    Over `max_bytes` the biggest new binaries are left out first and named in `omitted`, as is any new file larger than
    `FILE_LIMIT`; when that does not help it is a `CaptureError`. Blocking.
    """
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "store", alternate=prepared.store)
        index = Path(scratch) / "index"
        oversized: list[bytes] = []
        found = read_tar(store, tar, prepared.entries, oversized=oversized)
        new = [path for path in (*found, *oversized) if path not in prepared.entries]
        left_out = ignored(prepared.store, prepared.entries, new)
        if grown := [path for path in oversized if path in prepared.entries]:
            raise CaptureError(f"{_name(grown[0])} of the base has become larger than {FILE_LIMIT} bytes")
        final = {path: entry for path, entry in found.items() if path not in left_out}
        tree = store.write_tree(final, index)
        diff = store.diff(prepared.base_tree, tree)
        omitted = [path for path in oversized if path not in left_out]
        if len(diff) > max_bytes:
            candidates = _new_binaries(store, {p: e for p, e in final.items() if p not in prepared.entries})
            while len(diff) > max_bytes and candidates:
                excess = len(diff) - max_bytes
                while candidates and excess > 0:
                    size, path = candidates.pop()
                    excess -= size + size // 3 + 100  # as much as base85 and the header can add
                    omitted.append(path)
                    del final[path]
                tree = store.write_tree(final, index)
                diff = store.diff(prepared.base_tree, tree)
            if len(diff) > max_bytes:
                raise CaptureError(
                    f"the patch is {len(diff)} bytes, more than {max_bytes}, even without {len(omitted)} new binaries"
                )
        paths = sorted(prepared.entries.keys() | final.keys())
        changed = [path for path in paths if prepared.entries.get(path) != final.get(path)]
        return Patch(diff, tree, tuple(map(_name, changed)), tuple(map(_name, omitted)))


def _new_binaries(store: Store, new: dict[bytes, Entry]) -> list[tuple[int, bytes]]:
    """(size, path) of the binary files among `new`, smallest first."""
    paths = [path for path, entry in new.items() if entry.mode != "120000"]
    contents = store.blobs([new[path].blob for path in paths])
    sized = [(len(c), p) for p, c in zip(paths, contents, strict=True) if b"\0" in c[:_BINARY_PROBE]]
    return sorted(sized)


def _name(path: bytes) -> str:
    """A path for people and JSON: bytes that are not UTF-8 shown as escapes."""
    return path.decode("utf-8", "backslashreplace")
