"""Small git repositories on the host, and the tar streams that a sandbox would give of a directory."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sandlot.sandbox.jail import archive
from sandlot.tasks import Repository
from sandlot.workspace import Patch, Prepared
from sandlot.workspace.apply import apply_to_tree
from sandlot.workspace.capture import patch_of_tar
from sandlot.workspace.git import Store, git_environment
from sandlot.workspace.prepare import GIT_NAMES
from sandlot.workspace.repository import built

Content = str | bytes | Path | None
"""What a file is set to: text, bytes, a link's target (a `Path`), or None to delete it."""


def git(directory: Path, *arguments: str, check: bool = True) -> str:
    """Git as an ordinary user has it, without this machine's configuration."""
    environment = {**git_environment(), "HOME": str(directory), "GIT_CEILING_DIRECTORIES": str(directory.parent)}
    command = ["git", "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"git {' '.join(arguments)}: {done.stderr.decode('utf-8', 'replace')}")
    return done.stdout.decode("utf-8", "replace")


def write(directory: Path, files: Mapping[str, Content]) -> None:
    """Set files below `directory`; whatever is in the way goes."""
    for name, content in files.items():
        path = directory / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            subprocess.run(["rm", "-rf", str(path)], check=True)
        if content is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def repository(directory: Path, *commits: Mapping[str, Content], branch: str = "base") -> Path:
    """A repository whose branch has one commit per set of files."""
    directory.mkdir(parents=True, exist_ok=True)
    git(directory, "init", "--quiet", f"--initial-branch={branch}", ".")
    for number, files in enumerate(commits, 1):
        write(directory, files)
        git(directory, "add", "--all", "--force")
        git(directory, "commit", "--quiet", "--allow-empty", "-m", f"Commit {number}")
    return directory


def stream(directory: Path, to: Path, *revisions: str) -> Path:
    """The `git fast-export` stream of a repository in the file `to`."""
    done = subprocess.run(
        ["git", "fast-export", "--signed-tags=strip", *(revisions or ("--all",))],
        cwd=directory, env=git_environment(), capture_output=True, check=True,
    )  # fmt: skip
    to.write_bytes(done.stdout)
    return to


def tar_of(directory: Path) -> IO[bytes]:
    """What `download_tar` gives of a directory, by the code that runs inside a sandbox: everything called `.git` is
    left out."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # it goes with its last reference
    archive.pack(str(directory), file.fileno(), frozenset(GIT_NAMES), 1 << 40)
    file.seek(0)
    return file


def prepared(source: Repository) -> Prepared:
    """The workspace that `prepare` gives for a repository, without a sandbox."""
    made = built(source)
    return Prepared(made.commit, made.tree, made.store.entries(made.tree), made.store)


def checkout(source: Repository, directory: Path) -> Path:
    """The prepared repository unpacked into `directory`, as an agent finds it."""
    directory.mkdir(parents=True)
    subprocess.run(["tar", "-xf", str(built(source).tar), "-C", str(directory)], check=True)
    return directory


def patch_of(source: Repository, scratch: Path, files: Mapping[str, Content]) -> Patch:
    """The captured patch of an agent that set `files`."""
    work = checkout(source, scratch)
    write(work, files)
    return patch_of_tar(tar_of(work), prepared(source))


def captured(source: Repository, work: Path, max_bytes: int = 1 << 20) -> tuple[Patch, dict[str, bytes]]:
    """The patch of `work`, proven by applying it to the base; with the resulting files."""
    base = prepared(source)
    patch = patch_of_tar(tar_of(work), base, max_bytes)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "proof", alternate=base.store)
        assert apply_to_tree(store, base.base_tree, patch.diff, Path(scratch) / "index") == patch.tree
        entries = store.entries(patch.tree)
        contents = dict(zip(entries, store.blobs([entry.blob for entry in entries.values()]), strict=True))
    return patch, {os.fsdecode(path): content for path, content in contents.items()}
