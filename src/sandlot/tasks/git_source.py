"""Directories of a git repository at one commit, checked out once into the cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from sandlot.cache import cache_dir, locked
from sandlot.errors import TaskError

_TIMEOUT = 1800.0
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_POINTER = b"version https://git-lfs.github.com/spec/"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|\w[^/@]*@[^/:]+:")


class GitSource:
    """A repository by URL or path (below `beside`, if relative), at a full commit id; without one at its newest now."""

    def __init__(self, url: str, commit: str = "", *, beside: Path = Path()) -> None:
        self._url = url if _REMOTE.match(url) else str((beside / url).resolve())
        self._commit = commit

    def directory(self, path: str) -> Path:
        """The directory `path` of the repository. `TaskError` when there is none, or git cannot get it. Blocking."""
        inner = PurePosixPath(path)
        if inner.is_absolute() or ".." in inner.parts:
            raise TaskError(f"path: {path!r} leads out of {self._url}")
        commit = self._resolved()
        home = cache_dir() / "git-tasks" / hashlib.sha256(self._url.encode()).hexdigest()[:24]
        place = hashlib.sha256(str(inner).encode()).hexdigest()[:16]
        final = home / commit / place / (inner.name or PurePosixPath(self._url).stem)
        if not final.is_dir():
            with locked(home / "lock"):
                if not final.is_dir():
                    self._check_out(home, commit, inner, final)
        return final

    def _resolved(self) -> str:
        if self._commit in ("", "head", "HEAD"):
            said = self._git("ls-remote", "--exit-code", self._url, "HEAD", cwd=Path("/"))
            self._commit = said.split(b"\t")[0].decode("ascii", "replace")
        if not _COMMIT.fullmatch(self._commit):
            raise TaskError(f"git_commit_id: {self._commit!r} is no full commit id")
        return self._commit

    def _check_out(self, home: Path, commit: str, inner: PurePosixPath, final: Path) -> None:
        store = home / "repository.git"
        self._git("init", "--quiet", "--bare", "--template=", str(store), cwd=home)
        self._git("config", "remote.origin.url", self._url, cwd=store)
        if self._git("cat-file", "-t", commit, cwd=store, check=False) != b"commit\n":
            self._git("fetch", "--quiet", "--no-tags", "--depth=1", "--filter=blob:none", "origin", commit, cwd=store)
        with tempfile.TemporaryDirectory(dir=home, prefix="making-") as scratch:
            work = Path(scratch) / "work"
            work.mkdir()
            self._git(
                "--work-tree", str(work), "checkout", "--force", commit, "--", str(inner),
                cwd=store, GIT_INDEX_FILE=f"{scratch}/index", GIT_LITERAL_PATHSPECS="1",
            )  # fmt: skip
            made = work / inner
            if not made.is_dir() or made.is_symlink():
                raise TaskError(f"path: {str(inner)!r} is no directory of {self._url} at {commit}")
            if pointer := next((file for file in sorted(made.rglob("*")) if _is_pointer(file)), None):
                raise TaskError(
                    f"{pointer.relative_to(work)} of {self._url} lies in Git LFS, which is not asked: clone the "
                    "repository with git-lfs and give the directory of its tasks"
                )
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made, final)

    def _git(self, *arguments: str, cwd: Path, check: bool = True, **environment: str) -> bytes:
        """Git with the user's own configuration, which knows how to log in; it asks nothing and runs nothing else."""
        safe = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "file:https:ssh", "GIT_LFS_SKIP_SMUDGE": "1"}
        settings = ["-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-c", "gc.auto=0"]
        try:
            done = subprocess.run(
                ["git", *settings, *arguments],
                cwd=cwd,
                env={**os.environ, **safe, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except FileNotFoundError:
            raise TaskError(f"git_url: {self._url} needs git, which is not installed") from None
        except subprocess.TimeoutExpired:
            raise TaskError(f"git_url: {self._url} did not answer within {_TIMEOUT:.0f} s") from None
        if check and done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise TaskError(f"git_url: {self._url} cannot be had: {said[-1] if said else f'status {done.returncode}'}")
        return done.stdout


def _is_pointer(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as start:
        return start.read(len(_POINTER)) == _POINTER
