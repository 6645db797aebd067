"""Put a task's repository into a sandbox: at its base commit, with the future removed, owned by the agent user."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandlot.errors import SandboxError, TaskError
from sandlot.sandbox import AGENT_USER, ExecResult, Sandbox
from sandlot.tasks.task import HarborGrading, Repository, Task
from sandlot.workspace.git import Entry, Store
from sandlot.workspace.repository import BRANCH, CONFIG, built, shelf
from sandlot.workspace.snapshot import has_rules, ignored, read_tar, spool

GIT_NAMES = (".git",)
_SETUP_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Prepared:
    """A workspace as the agent (or the grader) finds it.

    `base_commit` is its HEAD. `base_tree` is the git tree of its files after the set-up commands, byte for byte as they
    lie in the workdir, which `entries` lists and whose objects are in `store` on the trusted side: what patches are
    taken against and applied to. It equals the commit's own tree unless set-up or line-end attributes changed files.
    """

    base_commit: str
    base_tree: str
    entries: dict[bytes, Entry]
    store: Store


async def prepare(sandbox: Sandbox, task: Task) -> Prepared:
    """Put the repository of `task` into `sandbox` and run the set-up commands.

    A repository named by the task is built on the trusted side from its base commit alone; one that the image brings is
    scrubbed in place. Either way it is proven that no object outside the history of the base commit is there.
    """
    if task.hidden:
        await _hide(sandbox, task)
    if task.repository is None:
        commit = await _scrub(sandbox, task)
        await _run_setup(sandbox, task)
        return await _observed(sandbox, task, commit)
    repository = await asyncio.to_thread(built, task.repository, task.mutation)
    await sandbox.upload_tar(task.workdir, repository.tar, user=AGENT_USER)
    await _expect_clean(sandbox, task, repository.commit)
    if task.setup:
        await _run_setup(sandbox, task)
        return await _observed(sandbox, task, repository.commit)
    entries = await asyncio.to_thread(repository.store.entries, repository.tree)
    return Prepared(repository.commit, repository.tree, entries, repository.store)


async def _hide(sandbox: Sandbox, task: Task) -> None:
    """Remove what the image holds of the tests, and see that it is gone."""
    script = 'rm -rf -- "$@"; for path; do [ ! -e "$path" ] && [ ! -L "$path" ] || exit 9; done'
    done = await sandbox.exec(["/bin/sh", "-c", script, "sh", *task.hidden], user="root", cwd="/", timeout=600)
    if not done.ok:
        raise SandboxError(f"what belongs to the tests of task {task.id} could not be removed: {_said(done)}")


async def hidden_files_at(sandbox: Sandbox, task: Task, revision: str, paths: tuple[str, ...]) -> dict[str, bytes]:
    """Files of the repository at `revision`, a future one too: only for a grader, and before `prepare`.

    From the repository that the task names, or from the image's own. An empty revision is the base commit, before the
    task's mutation.
    """
    if not revision and task.repository is None:
        revision = str(task.metadata.get("base_commit") or "HEAD")
    if task.repository is not None:
        return await asyncio.to_thread(_files_of_source, task.repository, revision, paths)
    found = {}
    for path in paths:
        shown = await sandbox.exec(
            ["/bin/sh", "-c", f'{_TRUSTING_GIT}git show "$1"', "sh", f"{revision}:{path}"],
            user="root",
            cwd=task.workdir,
        )
        if not shown.ok or shown.truncated:
            raise TaskError(f"task {task.id}: {path} cannot be read at {revision}: {shown.text()[:500]}")
        found[path] = shown.stdout
    return found


def _files_of_source(repository: Repository, revision: str, paths: tuple[str, ...]) -> dict[str, bytes]:
    from sandlot.workspace.repository import import_source

    with tempfile.TemporaryDirectory() as scratch:
        store, base = import_source(repository, Path(scratch) / "source")
        entries = store.entries(store.tree_of(revision or base))
        if missing := [path for path in paths if path.encode() not in entries]:
            place = repository.fast_export or repository.directory
            raise TaskError(f"{place}: {revision or 'the base commit'} has no file {missing[0]}")
        contents = store.blobs([entries[path.encode()].blob for path in paths])
        return dict(zip(paths, contents, strict=True))


async def _run_setup(sandbox: Sandbox, task: Task) -> None:
    if not task.setup:
        return
    for command in task.setup:
        done = await sandbox.exec(command, user="root", cwd=task.workdir, timeout=_SETUP_TIMEOUT)
        if not done.ok:
            raise TaskError(f"task {task.id}: the set-up command {command!r} failed: {_said(done)}")
    await sandbox.kill_processes()
    owned = await sandbox.exec(
        ["find", task.workdir, "!", "-user", AGENT_USER, "-exec", "chown", "-h", f"{AGENT_USER}:", "{}", "+"],
        user="root", timeout=_SETUP_TIMEOUT,
    )  # fmt: skip
    if not owned.ok:
        raise SandboxError(f"the workdir could not be given to the agent user: {_said(owned)}")


async def _expect_clean(sandbox: Sandbox, task: Task, commit: str) -> None:
    """`git status` inside is clean at the base commit; it also makes the index fit the files' times."""
    done = await sandbox.exec(
        "git rev-parse HEAD && git status --porcelain --ignored", cwd=task.workdir, timeout=_SETUP_TIMEOUT
    )
    if done.exit_code == 127:
        raise SandboxError("git is not in the sandbox's image: install git there", retryable=False)
    if not done.ok or done.stdout.strip() != commit.encode():
        raise SandboxError(f"the repository of task {task.id} did not arrive clean in the sandbox: {_said(done)}")


async def _scrub(sandbox: Sandbox, task: Task) -> str:
    base = task.metadata.get("base_commit") or ""
    env = {"BASE": str(base), "BRANCH": BRANCH, "CONFIG": CONFIG, "OWNER": AGENT_USER, "MUTATION": "", "REMOVED": ""}
    env["PLAIN"] = "1" if isinstance(task.grading, HarborGrading) else ""
    if task.mutation is not None:
        env["MUTATION"], env["REMOVED"] = f"/tmp/{secrets.token_hex(8)}", "\n".join(task.mutation.removed)
        await sandbox.write_file(env["MUTATION"], task.mutation.patch, mode=0o600, user="root")
    done = await sandbox.exec(
        ["/bin/sh", "-s"], user="root", cwd=task.workdir, stdin=SCRUB.encode(), timeout=_SETUP_TIMEOUT, env=env
    )
    if not done.ok:
        raise TaskError(
            f"task {task.id}: the repository in {task.workdir} of image {task.image!r} could not be brought to its "
            f"base commit without its future: {_said(done)}"
        )
    return done.stdout.decode().strip()


_TRUSTING_GIT = r"""
set -eu
export HOME=$(mktemp -d) LC_ALL=C
trap 'rm -rf "$HOME"' EXIT
printf '[safe]\n\tdirectory = *\n[pack]\n\twindow = 0\n\tcompression = 1\n' > "$HOME/.gitconfig"
export GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0
unset XDG_CONFIG_HOME GIT_CONFIG_GLOBAL GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
unset GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES
"""
"""Lets git work on a repository that is another user's, and with nobody's settings: older ones take the directories to
trust from a file only, and what `git fetch` starts reads no option of its command line."""
SCRUB = rf"""{_TRUSTING_GIT}
g() {{
    git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.attributesFile=/dev/null \
        -c gc.auto=0 -c fetch.unpackLimit=1 -c protocol.file.allow=always -c advice.detachedHead=false "$@"
}}
work=$(pwd -P)
as_us() {{ g -c user.name=Developer -c user.email=developer@localhost "$@"; }}
if [ -n "$PLAIN" ] && ! g rev-parse --git-dir >/dev/null 2>&1; then
    g init --quiet --template= .
    g add --all --force .
    as_us commit --quiet --allow-empty --no-verify -m "Initial commit" >&2
fi
fail() {{ echo "$1" >&2; exit 1; }}
[ "$(cd "$(g rev-parse --show-toplevel)" && pwd -P)" = "$work" ] || fail "not the top of a repository"
common=$(cd "$(g rev-parse --git-common-dir)" && pwd -P)
rm -f "$common/info/grafts" "$(g rev-parse --git-dir)/index.lock"
base=$(g rev-parse --verify --end-of-options "${{BASE:-HEAD}}^{{commit}}")
[ -z "$BASE" ] || g checkout --quiet --force --detach "$base" >&2
if [ -n "$MUTATION" ]; then
    g reset --quiet --hard >&2
    g apply --index --whitespace=nowarn "$MUTATION"
    rm -f "$MUTATION"
    printf '%s\n' "$REMOVED" | while IFS= read -r path; do
        [ -z "$path" ] || g rm --quiet --force --ignore-unmatch -- "$path" >&2
    done
    base=$(as_us commit-tree "$(g write-tree)" -m "Initial commit")
fi
fresh=$(mktemp -d)
g init --quiet --template= "$fresh"
g update-ref refs/sandlot/base "$base"
( cd "$fresh"
  g fetch --quiet --no-tags --update-head-ok --update-shallow "file://$common" "+refs/sandlot/base:refs/heads/$BRANCH"
  g symbolic-ref HEAD "refs/heads/$BRANCH" )
find "$work" -name .git -prune -exec rm -rf {{}} +
rm -rf "$common"
rm -rf "$fresh/.git/logs" "$fresh/.git/FETCH_HEAD" "$fresh/.git/hooks" "$fresh/.git/branches" "$fresh/.git/info"
printf '%s' "$CONFIG" > "$fresh/.git/config"
cp -R "$fresh/.git" "$work/.git"
rm -rf "$fresh"
g reset --quiet >&2
rm -rf "$work/.git/logs" "$work/.git/ORIG_HEAD"
have=$(mktemp) past=$(mktemp)
g cat-file --batch-all-objects --batch-check='%(objectname)' | sort > "$have"
g rev-list --objects "$base" | cut -d' ' -f1 | sort > "$past"
extra=$(comm -23 "$have" "$past" | wc -l)
rm -f "$have" "$past"
[ "$extra" -eq 0 ] || fail "$extra objects lie outside the history of $base"
find "$work" ! -user "$OWNER" -exec chown -h "$OWNER:" {{}} +
echo "$base"
"""
"""Run as root in the image's repository (or, with PLAIN, in a work tree that has none). It is made anew from the base
commit: nothing else of the old one is kept, so branches, tags, reflogs, stash, worktrees, alternates, remotes, hooks
and unreachable objects need no list."""


async def _observed(sandbox: Sandbox, task: Task, commit: str) -> Prepared:
    """The workspace as it lies there now; its files are kept in a store named by their tree."""
    listed = await sandbox.exec(["git", "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit], cwd=task.workdir)
    if not listed.ok or listed.truncated:
        raise SandboxError(f"the files of the base commit could not be listed: {_said(listed)}")
    tracked = set(listed.stdout.split(b"\0")) - {b""}
    with await spool(sandbox.download_tar(task.workdir, exclude_names=GIT_NAMES)) as tar:
        return await asyncio.to_thread(_keep, tar, tracked, commit)


def _keep(tar: IO[bytes], tracked: Set[bytes], commit: str) -> Prepared:
    """The files are hashed first, and stored only when this machine has not seen their tree yet."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "store")
        found = read_tar(store, tar, {}, only=has_rules)
        left_out = ignored(store, found, [path for path in found if path not in tracked])
        entries = {path: entry for path, entry in found.items() if path not in left_out}
        tree = store.write_tree(entries, Path(scratch) / "index")

    def fill(place: Path) -> None:
        tar.seek(0)
        store = Store.create(place / "store")
        read_tar(store, tar, {}, only=entries.__contains__)
        store.write_tree(entries, place / "index")

    kept = shelf().get(f"tree-{tree}", fill)
    return Prepared(commit, tree, entries, Store(kept.path / "store", kept))


def _said(done: ExecResult) -> str:
    end = "it timed out" if done.timed_out else f"exit status {done.exit_code}"
    return f"{end}; {done.text()[-1000:].strip()}"
