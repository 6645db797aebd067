"""Preparing, capturing and applying in real sandboxes: no future inside, and the agent's doings do not matter."""

import io
import tarfile
from pathlib import Path

import pytest

from sandlot.errors import SandboxError, TaskError
from sandlot.sandbox import Sandbox, SandboxBackend, SandboxSpec
from sandlot.tasks import CommandGrading, Repository, Task
from sandlot.workspace import Patch, apply_patch, capture, prepare
from support.cheats import BASE, FIXED, calc_task
from support.repositories import git, repository, stream

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
    (origin / ".git" / "packed-note").write_text(SECRET)
    return origin, base


async def nothing_of_the_future(sandbox: Sandbox, workdir: str, base: str) -> None:
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
        await nothing_of_the_future(sandbox, task.workdir, base)


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
        await nothing_of_the_future(sandbox, task.workdir, base)


async def test_a_future_that_is_checked_out_is_taken_back(backend: SandboxBackend, tmp_path: Path) -> None:
    origin, base = messy(tmp_path)
    git(origin, "checkout", "-q", "fix")
    task = Task("t", "x", CommandGrading("true"), workdir="/workspace/t", metadata={"base_commit": base})
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        await sandbox.upload_tar(task.workdir, tar_with_git(origin), user="root")
        await prepare(sandbox, task)
        await nothing_of_the_future(sandbox, task.workdir, base)


async def test_an_image_without_a_repository_is_refused(backend: SandboxBackend) -> None:
    task = Task("t", "x", CommandGrading("true"), workdir="/workspace/t")
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        with pytest.raises(TaskError, match="could not be brought to its base commit"):
            await prepare(sandbox, task)


async def test_capture_apply_and_set_up_agree_between_two_sandboxes(backend: SandboxBackend) -> None:
    task = calc_task(setup=("echo built > built.txt; mkdir -p out; echo log > out/x.log",))
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as agent:
        made = await prepare(agent, task)
        assert b"built.txt" in made.entries
        assert b"out/x.log" not in made.entries
        assert (await capture(agent, made, workdir=task.workdir)).empty
        did = await agent.exec(
            "git checkout -q -b fix && sed -i 's/a - b/a + b/' calc/core.py && git commit -qam fix"
            " && printf 'x\\000y' > blob.bin && chmod +x tests/helpers.py && ln -s /etc/passwd leak && rm .gitignore"
            " && mkdir -p pkg && cd pkg && git init -q && echo m > m.py && rm -rf ../.git/refs",
            cwd=task.workdir,
        )
        assert did.ok, did.text()
        await agent.spawn("while :; do date +%N > ticking.txt; done", cwd=task.workdir)
        patch = await capture(agent, made, workdir=task.workdir)
        again = await capture(agent, made, workdir=task.workdir)
    assert patch.tree == again.tree, "nothing runs any more"
    assert set(patch.files) - {"ticking.txt"} == {
        ".gitignore", "blob.bin", "calc/core.py", "leak", "pkg/m.py", "tests/helpers.py",
    }  # fmt: skip
    assert b"root:" not in patch.diff
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as clean:
        base = await prepare(clean, task)
        applied = await apply_patch(clean, patch, base, workdir=task.workdir)
        assert (applied.ok, applied.tree) == (True, patch.tree)
        shown = await clean.exec(
            "cat calc/core.py; readlink leak; ls -l tests/helpers.py; ls .gitignore", cwd=task.workdir
        )
        assert b"a + b" in shown.stdout
        assert b"/etc/passwd" in shown.stdout
        assert b"-rwxr-xr-x" in shown.stdout
        assert b"No such file" in shown.stderr


async def test_a_patch_that_does_not_fit_changes_nothing(backend: SandboxBackend) -> None:
    task = calc_task()
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        made = await prepare(sandbox, task)
        good = b"diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+n\n"
        bad = b"diff --git a/calc/core.py b/calc/core.py\n--- a/calc/core.py\n+++ b/calc/core.py\n@@ -1 +1 @@\n-z\n+y\n"
        refused = await apply_patch(sandbox, good + bad, made, workdir=task.workdir)
        assert not refused.ok
        assert "does not apply" in refused.reason
        wrong = await apply_patch(sandbox, Patch(good, "0" * 40), made, workdir=task.workdir)
        assert not wrong.ok
        assert "captured from" in wrong.reason
        status = await sandbox.exec("git status --porcelain --ignored", cwd=task.workdir)
        assert status.stdout == b""
        assert (await apply_patch(sandbox, good, made, workdir=task.workdir)).ok


async def test_deleted_directories_are_gone(backend: SandboxBackend) -> None:
    task = calc_task()
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as agent:
        made = await prepare(agent, task)
        await agent.exec("rm -rf calc tests && mkdir -p a/b && echo x > a/b/calc", cwd=task.workdir)
        patch = await capture(agent, made, workdir=task.workdir)
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as clean:
        base = await prepare(clean, task)
        await apply_patch(clean, patch, base, workdir=task.workdir)
        left = await clean.exec("ls -d calc tests a/b/calc", cwd=task.workdir)
        assert left.stdout == b"a/b/calc\n"


async def test_nothing_of_ours_is_in_the_tree(backend: SandboxBackend) -> None:
    task = calc_task()
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        await prepare(sandbox, task)
        found = await sandbox.exec(
            "find . -path ./.git -prune -o -type f -print; grep -rai sandlot .", cwd=task.workdir
        )
        assert sorted(found.stdout.decode().split()) == sorted(f"./{name}" for name in BASE)


async def test_a_sandbox_without_git_says_so(backend: SandboxBackend) -> None:
    task = calc_task()
    async with await backend.create(SandboxSpec(workdir=task.workdir, env={"PATH": "/nowhere"})) as sandbox:
        with pytest.raises(SandboxError, match="git is not in the sandbox's image"):
            await prepare(sandbox, task)
