"""A task's repository as the agent may see it: the base commit, its own history, and nothing of the future.

Built once per source on the trusted side and kept in the cache by the digest of what it was built from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from sandlot.cache import Shelf, cache_dir
from sandlot.errors import TaskError
from sandlot.tasks.task import Mutation, Repository
from sandlot.workspace.git import GitError, Store, run_git
from sandlot.workspace.snapshot import read_tar

BRANCH = "main"
CONFIG = f"""\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
[user]
\tname = Developer
\temail = developer@localhost
[init]
\tdefaultBranch = {BRANCH}
[commit]
\tgpgsign = false
[gc]
\tauto = 0
"""
"""The configuration of the agent's repository: an identity, and nothing that reaches outside."""
CACHE_LIMIT = 32 << 30
"""Bytes of disk that the workspaces of a machine may take, but for those in use."""
_FORMAT = b"2"
"""Changes when what is built from the same source changes."""


@dataclass(frozen=True)
class BuiltRepository:
    """A repository at its base commit. `tar` holds working tree and `.git`; `store` is its bare object store."""

    tar: Path
    store: Store
    commit: str
    tree: str


def shelf() -> Shelf:
    """Where workspaces are kept on this machine."""
    return Shelf(cache_dir() / "workspaces", max_bytes=CACHE_LIMIT)


def built(repository: Repository, mutation: Mutation | None = None) -> BuiltRepository:
    """Build the repository, or take it from the cache. Blocking."""
    kept = shelf().get(_digest(repository, mutation), lambda place: _build(repository, mutation, place))
    commit, tree = (kept.path / "base").read_text().split()
    return BuiltRepository(kept.path / "repository.tar", Store(kept.path / "store", kept), commit, tree)


def _digest(repository: Repository, mutation: Mutation | None) -> str:
    digest = hashlib.sha256(_FORMAT + CONFIG.encode())
    digest.update(repository.base.encode() + b"\0")
    if mutation is not None:
        digest.update(b"\0".join((*map(os.fsencode, mutation.removed), b"", mutation.patch)) + b"\0")
    if repository.fast_export is not None:
        digest.update(repository.fast_export.read_bytes())
    elif repository.directory is not None:
        for path in sorted(repository.directory.rglob("*")):
            status = path.lstat()
            digest.update(b"\0%s\0%o\0" % (os.fsencode(path.relative_to(repository.directory)), status.st_mode))
            if path.is_symlink():
                digest.update(os.fsencode(os.readlink(path)))
            elif path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def import_source(repository: Repository, path: Path) -> tuple[Store, str]:
    """Everything the source holds, the future too, in a bare store at `path`; with the id of the base commit."""
    store = Store.create(path)
    if repository.fast_export is not None:
        store.git("fast-import", "--quiet", "--force", stdin=repository.fast_export.read_bytes())
        return store, _base(repository, store)
    if repository.directory is None:
        raise TaskError("a repository needs a fast_export file or a directory")
    source = repository.directory.resolve()
    tracked = store.with_index(path / "directory.index")
    tracked.git(f"--work-tree={source}", "add", "--all", "--force", "--", ".")
    tree = tracked.git("write-tree").decode().strip()
    commit = store.git("commit-tree", tree, "-m", "Initial commit").decode().strip()
    store.git("update-ref", f"refs/heads/{BRANCH}", commit)
    return store, commit


def _base(repository: Repository, store: Store) -> str:
    """The base commit; `HEAD` of a stream means its only branch."""
    heads = store.git("for-each-ref", "--format=%(refname)", "refs/heads").decode().split()
    base = heads[0] if repository.base == "HEAD" and len(heads) == 1 else repository.base
    try:
        return store.commit_of(base)
    except Exception:
        raise TaskError(
            f"{repository.fast_export}: repository.base: {repository.base!r} is no commit of it; "
            f"its branches are {', '.join(heads) or 'none'}"
        ) from None


def _mutated(repository: Repository, source: Store, commit: str, mutation: Mutation) -> str:
    """A commit without parents whose tree is that of `commit` after the mutation."""
    tracked = source.with_index(source.path / "mutation.index")
    try:
        tracked.git("read-tree", commit)
        tracked.git("apply", "--cached", "--binary", "-", stdin=mutation.patch)
        gone = b"".join(b"0 %s\t%s\0" % (b"0" * 40, os.fsencode(path)) for path in mutation.removed)
        tracked.git("update-index", "-z", "--index-info", stdin=gone)
        tree = tracked.git("write-tree").decode().strip()
    except GitError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        raise TaskError(f"{repository.fast_export or repository.directory}: the patch that makes the bug does not "
                        f"apply to the base commit: {said or error}") from None  # fmt: skip
    return source.git("commit-tree", tree, "-m", "Initial commit").decode().strip()


def _build(repository: Repository, mutation: Mutation | None, place: Path) -> None:
    source, commit = import_source(repository, place / "source")
    if mutation is not None:
        commit = _mutated(repository, source, commit, mutation)
    work = place / "work"
    work.mkdir()
    run_git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}", ".", cwd=work)
    # A pull over the file protocol carries what is reachable from the base, and no other object.
    source.git("update-ref", "refs/sandlot/base", commit)
    run_git(
        "fetch", "--quiet", "--no-tags", "--update-head-ok", "--no-write-fetch-head",
        source.path.resolve().as_uri(),
        f"+refs/sandlot/base:refs/heads/{BRANCH}", cwd=work,
    )  # fmt: skip
    run_git("reset", "--quiet", "--hard", cwd=work)
    git = work / ".git"
    for name in ("logs", "FETCH_HEAD", "ORIG_HEAD", "branches", "description", "hooks", "info"):
        shutil.rmtree(git / name, ignore_errors=True) if (git / name).is_dir() else (git / name).unlink(missing_ok=True)
    (git / "config").write_text(CONFIG)
    only_the_past(work, commit)
    with tarfile.open(place / "repository.tar", "w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        tar.add(work, arcname=".", filter=_anonymous)
    git.rename(place / "store")
    store = Store(place / "store")
    store.git("config", "core.bare", "true")
    # The files as they were checked out: attributes of the repository may have converted line ends.
    with (place / "repository.tar").open("rb") as files:
        found = read_tar(store, files, store.entries(commit))
    tree = store.write_tree(found, place / "index")
    shutil.rmtree(work)
    shutil.rmtree(source.path)
    (place / "base").write_text(f"{commit} {tree}\n")


def only_the_past(work: Path, commit: str) -> None:
    """Raise unless every object of the repository at `work` is reachable from `commit`."""
    have = set(run_git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", cwd=work).split())
    past = {line.split(b" ")[0] for line in run_git("rev-list", "--objects", commit, cwd=work).splitlines()}
    if extra := have - past:
        raise TaskError(f"the prepared repository holds {len(extra)} objects outside the history of {commit}")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 1704067200
    return member
