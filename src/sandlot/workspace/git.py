"""Git on the trusted side: one runner without anyone's configuration, and a bare store of objects.

Everything here runs outside the sandbox on data that an agent may have made, so nothing is ever checked out: files
are only hashed, listed and compared. Configuration, attributes, hooks and replace refs cannot reach it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandlot.cache import Kept
from sandlot.errors import SandlotError

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_TIMEOUT = 600.0

Entries = Mapping[bytes, "Entry"]
"""A tree as path → entry, directories left out."""


class GitError(SandlotError):
    """A git command of our own failed. `stderr` is what it said."""

    def __init__(self, message: str, stderr: bytes = b"") -> None:
        super().__init__(message)
        self.stderr = stderr


@dataclass(frozen=True)
class Entry:
    """One file of a tree: git's mode (`100644`, `100755`, `120000`) and the blob's id."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Change:
    """One path that differs between two trees; None where it does not exist."""

    path: bytes
    old: Entry | None
    new: Entry | None


def git_environment() -> dict[str, str]:
    """The environment of every git command here: nobody's configuration, plain messages, never a question."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_AUTHOR_NAME": "Developer",
        "GIT_AUTHOR_EMAIL": "developer@localhost",
        "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
        "GIT_COMMITTER_NAME": "Developer",
        "GIT_COMMITTER_EMAIL": "developer@localhost",
        "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
    }


_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.autocrlf=false",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.protectNTFS=false",
    "core.protectHFS=false",
    "core.precomposeUnicode=false",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.fsync=none",
    "apply.whitespace=nowarn",
    "diff.renames=false",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "fastimport.unpackLimit=1",
    "fetch.unpackLimit=1",
    "gc.auto=0",
    "init.defaultBranch=main",
    "safe.directory=*",
)


def git_command(*arguments: str | bytes) -> list[str | bytes]:
    """A git command line with our settings."""
    return ["git", *(part for setting in _SETTINGS for part in ("-c", setting)), *arguments]


def run_git(
    *arguments: str | bytes,
    cwd: Path,
    stdin: bytes | None = None,
    environment: Mapping[str, str] | None = None,
    allowed: Sequence[int] = (0,),
) -> bytes:
    """Run git in `cwd` and return its stdout; `GitError` when it ends with a status that is not `allowed`."""
    try:
        done = subprocess.run(
            git_command(*arguments),
            cwd=cwd,
            env={**git_environment(), **(environment or {})},
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        raise GitError("git is not installed here; install it (Debian and Ubuntu: apt-get install git)") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {_name(arguments)} ran longer than {_TIMEOUT:.0f} s") from None
    if done.returncode not in allowed:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise GitError(f"git {_name(arguments)} failed with status {done.returncode}: {said[-2000:]}", done.stderr)
    return done.stdout


def _name(arguments: Sequence[str | bytes]) -> str:
    return " ".join(os.fsdecode(a) for a in arguments[:3])


def make_repository(path: Path, *, bare: bool) -> None:
    """An empty repository whose git directory is `path`: what `git init` makes, without templates and a process."""
    for name in ("objects/info", "objects/pack", "refs/heads"):
        (path / name).mkdir(parents=True, exist_ok=True)
    (path / "HEAD").write_text("ref: refs/heads/main\n")
    (path / "config").write_text(f"[core]\n\trepositoryformatversion = 0\n\tbare = {str(bare).lower()}\n")


@dataclass(frozen=True)
class Store:
    """A bare repository used for its objects. `path` is its directory; each method is one or two git commands.

    `kept` keeps it in the cache for as long as anyone has the store.
    """

    path: Path
    kept: Kept | None = field(default=None, repr=False, compare=False)
    _environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def create(cls, path: Path, *, alternate: Store | None = None) -> Store:
        """Make an empty store; objects of `alternate` can be read through it."""
        make_repository(path, bare=True)
        if alternate is not None:
            (path / "objects" / "info" / "alternates").write_text(f"{(alternate.path / 'objects').resolve()}\n")
        return cls(path)

    def git(self, *arguments: str | bytes, stdin: bytes | None = None, allowed: Sequence[int] = (0,)) -> bytes:
        """Run git with this store as its repository."""
        environment = {"GIT_DIR": str(self.path), "GIT_ATTR_SOURCE": EMPTY_TREE, **self._environment}
        return run_git(*arguments, cwd=self.path, stdin=stdin, environment=environment, allowed=allowed)

    def with_index(self, index: Path) -> Store:
        """The same store, using the index file `index`."""
        return replace(self, _environment={"GIT_INDEX_FILE": str(index)})

    def commit_of(self, revision: str) -> str:
        """The full id of the commit that `revision` names."""
        found = self.git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        return found.decode().strip()

    def tree_of(self, revision: str) -> str:
        """The id of the tree that `revision` names."""
        return self.git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{tree}}").decode().strip()

    def entries(self, tree: str) -> dict[bytes, Entry]:
        """All files of a tree, gitlinks left out."""
        found = {}
        for line in self.git("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0"):
            if not line:
                continue
            facts, _, path = line.partition(b"\t")
            mode, kind, blob = facts.decode().split(" ")
            if kind == "blob":
                found[path] = Entry(mode, blob)
        return found

    def write_tree(self, entries: Entries, index: Path) -> str:
        """Write the tree that holds exactly `entries`; the tree's id. That their blobs are here is not looked at."""
        index.unlink(missing_ok=True)
        store = self.with_index(index)
        lines = b"".join(b"%s %s\t%s\0" % (e.mode.encode(), e.blob.encode(), path) for path, e in entries.items())
        store.git("update-index", "-z", "--index-info", stdin=lines)
        return store.git("write-tree", "--missing-ok").decode().strip()

    def diff(self, old: str, new: str) -> bytes:
        """The patch from tree `old` to tree `new`: binary data and full ids in it, renames as delete and add."""
        return self.git(
            "diff-tree", "-r", "-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv",
            "--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", old, new,
        )  # fmt: skip

    def changes(self, old: str, new: str) -> list[Change]:
        """The paths that differ between two trees, in git's order."""
        parts = self.git("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", old, new).split(b"\0")
        found = []
        for facts, path in zip(parts[0::2], parts[1::2], strict=False):
            old_mode, new_mode, old_blob, new_blob, _ = facts.decode().lstrip(":").split(" ")
            found.append(
                Change(
                    path,
                    None if old_mode == "000000" else Entry(old_mode, old_blob),
                    None if new_mode == "000000" else Entry(new_mode, new_blob),
                )
            )
        return found

    def blobs(self, ids: Sequence[str]) -> Iterator[bytes]:
        """The contents of blobs, in the order asked."""
        if not ids:
            return
        stream = self.git("cat-file", "--batch", stdin="".join(f"{i}\n" for i in ids).encode())
        position = 0
        for wanted in ids:
            end = stream.index(b"\n", position)
            header = stream[position:end].split(b" ")
            if len(header) != 3:
                raise GitError(f"the store lacks the object {wanted}")
            size = int(header[2])
            yield stream[end + 1 : end + 1 + size]
            position = end + 1 + size + 1
