"""A directory of a sandbox as a git tree: read from a tar stream, file by file, never unpacked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from sandlot.workspace.git import (
    Entries,
    Entry,
    GitError,
    Store,
    git_command,
    git_environment,
    make_repository,
    run_git,
)

IGNORED_ALWAYS = (
    "__pycache__/",
    "*.py[co]",
    ".pytest_cache/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    ".DS_Store",
)
"""Droppings of running code that are no one's work, even where the repository's own rules do not name them."""


async def spool(stream: AsyncIterator[bytes]) -> IO[bytes]:
    """The whole stream in an unnamed temporary file, rewound."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    try:
        async for chunk in stream:
            file.write(chunk)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


FILE_LIMIT = 64 << 20
"""Files larger than this, in bytes, are never held in memory."""


def read_tar(
    store: Store,
    tar: IO[bytes],
    known: Entries,
    *,
    oversized: list[bytes] | None = None,
    only: Callable[[bytes], bool] = lambda path: True,
) -> dict[bytes, Entry]:
    """Hash every regular file and link of a tar into `store`; path → entry.

    Paths that are not among the `only` ones are hashed but not stored. With `oversized` files above `FILE_LIMIT` are
    only hashed: one that is not in `known` as it is is left out, and its path is added to the list.

    Whatever lies in a directory called `.git` (in any spelling of case) is left out, as is a file of that name, so
    nested repositories and submodules are plain files. Blobs of `known` are in the store already. Empty directories
    and special files are nothing to git.
    """
    have = {entry.blob for entry in known.values()}
    found: dict[bytes, Entry] = {}
    with (
        tarfile.open(fileobj=tar, mode="r:", encoding="utf-8", errors="surrogateescape") as archive,
        _blob_writer(store) as write,
    ):
        for member in archive:
            path = _clean(member.name)
            if path is None:
                continue
            if member.issym():
                mode, data = "120000", os.fsencode(member.linkname)
            elif member.isreg():
                file = archive.extractfile(member)
                assert file is not None
                if oversized is not None and member.size > FILE_LIMIT:
                    same = known.get(path)
                    if same is not None and same.blob == _hash(file, member.size):
                        found[path] = Entry("100755" if member.mode & 0o100 else "100644", same.blob)
                    else:
                        oversized.append(path)
                    continue
                mode, data = ("100755" if member.mode & 0o100 else "100644"), file.read()
            else:
                continue
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            if blob not in have and only(path):
                write(data)
                have.add(blob)
            found[path] = Entry(mode, blob)
    return found


def _hash(file: IO[bytes], size: int) -> str:
    """The id of a blob, read in pieces."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _clean(name: str) -> bytes | None:
    """A member's path as git spells it, or None for what git has no place for."""
    parts = [part for part in os.fsencode(name).split(b"/") if part not in (b"", b".")]
    if not parts or b".." in parts or any(part.lower() == b".git" for part in parts):
        return None
    return b"/".join(parts)


@contextmanager
def _blob_writer(store: Store) -> Iterator[Callable[[bytes], None]]:
    """A function that puts a blob into the store. Git is started for the first one."""
    with ExitStack() as stack:
        pipe = cache(lambda: stack.enter_context(_fast_import(store)))

        def write(data: bytes) -> None:
            pipe().writelines((b"blob\ndata %d\n" % len(data), data, b"\n"))

        yield write


@contextmanager
def _fast_import(store: Store) -> Iterator[IO[bytes]]:
    """The stdin of a `git fast-import` into the store."""
    with tempfile.TemporaryFile() as said:
        importer = subprocess.Popen(
            git_command("-c", "core.compression=1", "fast-import", "--quiet", "--done", "--depth=0"),
            cwd=store.path,
            env={**git_environment(), "GIT_DIR": str(store.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        assert importer.stdin is not None
        try:
            yield importer.stdin
            importer.stdin.write(b"done\n")
            importer.stdin.close()
            status = importer.wait()
        except BrokenPipeError:
            status = -1
        finally:
            importer.kill()
            importer.wait()
            importer.stdin.close()
        if status != 0:
            said.seek(0)
            raise GitError(f"git fast-import failed: {said.read()[-2000:].decode('utf-8', 'replace')}")


def has_rules(path: bytes) -> bool:
    """Whether git takes a file for rules of what to ignore."""
    return path.rpartition(b"/")[2] == b".gitignore"


def ignored(store: Store, base: Entries, paths: list[bytes]) -> set[bytes]:
    """Those of `paths` that the base's own ignore files, or `IGNORED_ALWAYS`, tell git to ignore.

    Rules that came later do not count, so work cannot be hidden by an edited ignore file.
    """
    if not paths:
        return set()
    rules = {path: entry for path, entry in base.items() if has_rules(path) and entry.mode != "120000"}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        make_repository(root / ".git", bare=False)
        (root / ".git" / "info").mkdir()
        (root / ".git" / "info" / "exclude").write_text("\n".join(IGNORED_ALWAYS) + "\n")
        contents = store.blobs([entry.blob for entry in rules.values()])
        for path, content in zip(rules, contents, strict=True):
            target = root / os.fsdecode(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        # `./` keeps git from reading a name like `:!x` as more than a name.
        lines = b"".join(b"./%s\0" % path for path in paths)
        said = run_git("check-ignore", "--no-index", "-z", "--stdin", cwd=root, stdin=lines, allowed=(0, 1))
    return {path[2:] for path in said.split(b"\0") if path}
