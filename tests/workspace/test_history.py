"""No future inside: neither git, nor a search of every byte of the repository, finds what came after the base."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.sandbox import Sandbox, SandboxBackend, SandboxSpec
from sandlot.tasks import CommandGrading, Repository, Task
from sandlot.workspace import prepare
from sandlot.workspace.snapshot import spool
from support.cheats import BASE, FIXED
from support.repositories import git, repository, stream, write

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "the_future_fix"
SEARCHES = (
    f"git log --all -S {SECRET} --format=%H",
    f"git log --all --reflog --format=%B | grep {SECRET}",
    "git fsck --lost-found --no-progress | grep -E 'dangling|unreachable'",
    f"git cat-file --batch-all-objects --batch | grep -a {SECRET}",
    "git for-each-ref --format='%(refname)' | grep -v refs/heads/main",
    "git stash list",
    "git remote",
    "git reflog",
    "git worktree list | tail -n +2",
    "ls .git/hooks .git/logs .git/ORIG_HEAD .git/FETCH_HEAD .git/objects/info/alternates .git/modules 2>/dev/null",
    f"grep -ra {SECRET} . 2>/dev/null",
)


def messy(tmp_path: Path) -> tuple[Path, str]:
    """A repository checked out at its base, with the future reachable in every way; and the base's id."""
    origin = repository(tmp_path / "origin", {"a.py": "zero\n"}, BASE, branch="main")
    base = git(origin, "rev-parse", "HEAD").strip()

    def future(how: str) -> str:
        git(origin, "checkout", "-q", "--detach", base)
        (origin / "calc" / "core.py").write_text(f"# {SECRET} {how}\n{FIXED}")
        git(origin, "commit", "-qam", f"{SECRET} by {how}")
        return git(origin, "rev-parse", "HEAD").strip()

    git(origin, "branch", "fix", future("branch"))
    git(origin, "tag", "-a", "v2", "-m", SECRET, future("tag"))
    git(origin, "update-ref", "refs/pull/1/head", future("pull"))
    git(origin, "pack-refs", "--all")
    future("packed")
    git(origin, "gc", "-q")
    future("reflog only")
    git(origin, "checkout", "-q", "main")
    (origin / "calc" / "core.py").write_text(f"# {SECRET} stash\n")
    git(origin, "stash", "-q")
    loose = f"# {SECRET} loose object\n"
    (origin.parent / "loose").write_text(loose)
    git(origin, "hash-object", "-w", str(origin.parent / "loose"))
    git(origin, "remote", "add", "origin", f"https://example.invalid/{SECRET}")
    git(origin, "notes", "add", "-m", SECRET)
    (origin / ".git" / "hooks").mkdir(exist_ok=True)
    (origin / ".git" / "hooks" / "post-checkout").write_text(f"echo {SECRET}\n")
    git(origin, "replace", base, "fix")
    other = repository(tmp_path / "other", {"secret.py": f"{SECRET} of the alternate\n"})
    git(origin, "clone", "-q", "--bare", str(other), ".git/modules/lib")
    (origin / ".git/objects/info/alternates").write_text("../modules/lib/objects\n")
    git(origin, "update-ref", "refs/borrowed", git(other, "rev-parse", "HEAD").strip())
    git(origin, "bundle", "create", "-q", ".git/all.bundle", "--all")
    git(origin, "worktree", "add", "-q", "--detach", str(tmp_path / "elsewhere"), "fix")
    files = dict.fromkeys(("packed-note", "COMMIT_EDITMSG", "lfs/objects/aa/bb/aabb"), f"{base}\n{SECRET}\n")
    commits = dict.fromkeys(
        ("ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD"), git(origin, "rev-parse", "fix")
    )
    write(origin, {f".git/{name}": content for name, content in {**files, **commits}.items()})
    return origin, base


def future_of(origin: Path, base: str) -> list[str]:
    """The ids of all objects that are not of the past of `base`, those that nothing reaches too."""
    every = git(origin, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    past = {line.split(" ")[0] for line in git(origin, "rev-list", "--objects", base).splitlines()}
    return [name for name in every if name not in past]


def streams(data: bytes) -> Iterator[bytes]:
    """Everything in `data` that can be decompressed, wherever it begins: loose objects, and those inside of packs."""
    for start in range(len(data) - 1):
        if data[start] & 15 == 8 and (data[start] << 8 | data[start + 1]) % 31 == 0:
            try:
                yield zlib.decompressobj().decompress(data[start:])
            except zlib.error:
                continue


async def files_of(sandbox: Sandbox, directory: str) -> dict[str, bytes]:
    with await spool(sandbox.download_tar(directory)) as tar, tarfile.open(fileobj=tar, mode="r:") as archive:
        return {m.name: archive.extractfile(m).read() for m in archive if m.isreg()}  # type: ignore[union-attr]


async def test_the_search_of_every_byte_finds_what_is_there(tmp_path: Path) -> None:
    origin, base = messy(tmp_path)
    assert len(future_of(origin, base)) > 20
    packs = list((origin / ".git/objects/pack").glob("*.pack"))
    loose = [path for path in (origin / ".git/objects").glob("??/*") if path.is_file()]
    for places in (packs, loose):
        assert any(SECRET.encode() in found for path in places for found in streams(path.read_bytes()))


async def nothing_of_the_future(sandbox: Sandbox, workdir: str, origin: Path, base: str) -> None:
    ids = "\n".join(future_of(origin, base))
    looked_up = await sandbox.exec("git cat-file --batch-check", cwd=workdir, stdin=ids.encode())
    assert set(looked_up.stdout.decode().split()[1::2]) == {"missing"}
    for name, data in (await files_of(sandbox, workdir)).items():
        assert SECRET.encode() not in data, name
        if name.startswith(".git/"):
            assert not any(SECRET.encode() in found for found in streams(data)), name
            assert not any(i.encode() in data or bytes.fromhex(i) in data for i in ids.split()), name
    for search in SEARCHES:
        found = await sandbox.exec(search, cwd=workdir)
        assert found.stdout.strip() == b"", (search, found.text())
    state = await sandbox.exec("git rev-parse HEAD; git status --porcelain; git log --format=%s; git fsck", cwd=workdir)
    assert state.ok, state.text()
    assert state.stdout.decode().split("\n") == [base, "Commit 2", "Commit 1", ""]
    owners = await sandbox.exec(["find", workdir, "!", "-user", "agent"])
    assert owners.stdout == b""
    committed = await sandbox.exec("git commit -q --allow-empty -m mine && git log -1 --format=%an", cwd=workdir)
    assert committed.stdout == b"Developer\n", committed.text()


async def test_a_named_repository_arrives_without_its_future(backend: SandboxBackend, tmp_path: Path) -> None:
    origin, base = messy(tmp_path)
    source = Repository(fast_export=stream(origin, tmp_path / "repo.fi"), base=base)
    task = Task("t", "x", CommandGrading("true"), repository=source, workdir="/workspace/t")
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        made = await prepare(sandbox, task)
        assert made.base_commit == base
        await nothing_of_the_future(sandbox, task.workdir, origin, base)


def tar_with_git(directory: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(directory, arcname=".")
    return buffer.getvalue()


async def test_a_repository_of_the_image_is_scrubbed_in_place(backend: SandboxBackend, tmp_path: Path) -> None:
    origin, base = messy(tmp_path)
    git(origin, "worktree", "prune")
    task = Task("t", "x", CommandGrading("true"), workdir="/workspace/t", metadata={"base_commit": base})
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        await sandbox.upload_tar(task.workdir, tar_with_git(origin), user="root")
        dirty = await sandbox.exec(f"git -c safe.directory='*' log --all -S {SECRET} --format=%H", cwd=task.workdir)
        assert dirty.stdout.strip(), "the future must be there before"
        made = await prepare(sandbox, task)
        assert made.base_commit == base
        assert made.entries[b"calc/core.py"].mode == "100644"
        await nothing_of_the_future(sandbox, task.workdir, origin, base)


async def test_a_future_that_is_checked_out_is_taken_back(backend: SandboxBackend, tmp_path: Path) -> None:
    origin, base = messy(tmp_path)
    git(origin, "checkout", "-q", "fix")
    task = Task("t", "x", CommandGrading("true"), workdir="/workspace/t", metadata={"base_commit": base})
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        await sandbox.upload_tar(task.workdir, tar_with_git(origin), user="root")
        await prepare(sandbox, task)
        await nothing_of_the_future(sandbox, task.workdir, origin, base)
