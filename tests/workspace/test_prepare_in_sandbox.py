"""Preparing, capturing and applying in real sandboxes: the agent's doings do not matter."""

import pytest

from sandlot.errors import SandboxError, TaskError
from sandlot.sandbox import SandboxBackend, SandboxSpec
from sandlot.tasks import CommandGrading, Task
from sandlot.workspace import Patch, apply_patch, capture, prepare
from support.cheats import BASE, calc_task

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
