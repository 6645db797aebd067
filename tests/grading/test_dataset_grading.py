"""Grading of the public data sets' forms: fix and bug of each, fractions, runs that are repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandlot.errors import FailureKind
from sandlot.grading import Verdict, grade
from sandlot.grading.flaky import repeated
from sandlot.sandbox import SandboxBackend, SandboxSpec
from sandlot.tasks import (
    GradingOptions,
    HarborGrading,
    Mutation,
    PytestGrading,
    Repository,
    SwebenchGrading,
    Task,
)
from sandlot.tasks.patches import patch_of_contents, reversed_patch
from sandlot.workspace import prepare
from sandlot.workspace.repository import built
from support.cheats import BASE, BUGGY, FAIL_TO_PASS, FIXED, HIDDEN, PASS_TO_PASS, calc_patch, calc_task, in_add
from support.forms import HARBOR, SWEBENCH, TEST_PATCH
from support.repositories import repository, stream

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_test_patch_that_does_not_apply_is_ungraded(backend: SandboxBackend) -> None:
    bad = replace(SWEBENCH, test_patch=TEST_PATCH.replace(b"scale(2) == 4", b"scale(3) == 4"))
    verdict = await grade(calc_task(bad), b"", backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)
    assert "the test patch does not apply" in verdict.detail


async def test_what_the_test_patch_removes_stays_removed(backend: SandboxBackend) -> None:
    """Even where the agent changed it: the helper is gone, as the hidden tests see."""
    gone = patch_of_contents("tests/helpers.py", str(BASE["tests/helpers.py"]), None)
    sees = "def test_gone():\n    import pathlib\n    assert not pathlib.Path('tests/helpers.py').exists()\n"
    patch = (gone + patch_of_contents("tests/test_gone.py", None, sees)).encode()
    task = calc_task(SwebenchGrading(patch, ("tests/test_gone.py::test_gone",), timeout=60.0))
    assert (await grade(task, calc_patch({"tests/helpers.py": "LIMIT = 11\n"}), backend)).reward == 1.0
    assert (await grade(task, b"", backend)).reward == 1.0


async def test_a_smith_row_hides_its_bug_and_its_tests(backend: SandboxBackend, tmp_path: Path) -> None:
    """The agent finds one commit without the failing tests; its diff to anything says nothing of the solution."""
    files = {**BASE, "calc/core.py": FIXED, **HIDDEN}
    source = Repository(fast_export=stream(repository(tmp_path / "o", files), tmp_path / "repo.fi"))
    bug = patch_of_contents("calc/core.py", FIXED, BUGGY).encode()
    hidden = ("tests/test_core.py", "tests/test_more.py")
    grading = PytestGrading({}, FAIL_TO_PASS, PASS_TO_PASS, timeout=60.0, base_files=hidden)
    task = Task("smith", "x", grading, repository=source, workdir="/workspace/s", mutation=Mutation(bug, hidden))
    assert (await grade(task, reversed_patch(bug), backend)).reward == 1.0
    assert (await grade(task, b"", backend)).reward == 0.0
    weak = patch_of_contents("tests/test_core.py", None, "def test_add(): pass\n").encode()
    assert (await grade(task, weak, backend)).reward == 0.0
    async with await backend.create(SandboxSpec(workdir=task.workdir)) as sandbox:
        prepared = await prepare(sandbox, task)
        assert not {path.encode() for path in hidden} & set(prepared.entries)
        shown = await sandbox.exec("git log --oneline --all | wc -l; git fsck --lost-found; cat calc/core.py")
        assert shown.stdout.split(b"\n")[0].strip() == b"1"
        assert BUGGY.encode() in shown.stdout
        assert (await sandbox.exec("git cat-file --batch-all-objects --batch | grep -q 'a + b'")).exit_code == 1
    broken = replace(task, mutation=Mutation(reversed_patch(bug)))
    verdict = await grade(broken, b"", backend)
    assert verdict.reward is None
    assert "the patch that makes the bug does not apply" in verdict.detail
    assert built(source).commit != prepared.base_commit


async def image_of(backend: SandboxBackend, script: str, workdir: str = "/testbed") -> SandboxSpec:
    """A sandbox specification that boots what a script left: an image of our own."""
    sandbox = await backend.create(SandboxSpec(workdir=workdir))
    done = await sandbox.exec(script, user="root", cwd=workdir)
    assert done.ok, done.text()
    return SandboxSpec(workdir=workdir, snapshot=await sandbox.snapshot())


IN_IMAGE = f"""set -e
git config --global --add safe.directory '*'
git init -q -b main .
git config user.name x
git config user.email x@example.com
mkdir calc && printf 'from calc.core import add, scale\\n' > calc/__init__.py
cat > calc/core.py <<'E'
{FIXED}E
printf 'def test_add():\\n    from calc import add\\n    assert add(2, 3) == 5\\n' > test_core.py
git add -A
git commit -qm base
mkdir /r2e_tests && cp test_core.py /r2e_tests/test_1.py && echo secret > run_tests.sh
"""


async def test_a_mutation_and_hidden_paths_of_an_image(backend: SandboxBackend) -> None:
    bug = patch_of_contents("calc/core.py", FIXED, BUGGY).encode()
    task = Task(
        "image", "x", PytestGrading({}, ("test_core.py::test_add",)), workdir="/testbed",
        mutation=Mutation(bug, ("test_core.py",)), hidden=("/r2e_tests", "/testbed/run_tests.sh"),
    )  # fmt: skip
    spec = await image_of(backend, IN_IMAGE)
    async with await backend.create(spec) as sandbox:
        prepared = await prepare(sandbox, task)
        assert set(prepared.entries) == {b"calc/__init__.py", b"calc/core.py"}
        looked = await sandbox.exec("ls / /testbed; git log --all --oneline | wc -l; cat calc/core.py; git status -s")
        assert b"tests" not in looked.stdout
        assert b"\n1\n" in looked.stdout
        assert looked.stdout.endswith(BUGGY.encode())


async def test_a_work_tree_without_a_repository_gets_one_for_harbor(backend: SandboxBackend) -> None:
    task = Task("plain", "x", HARBOR, workdir="/app")
    spec = await image_of(backend, "echo one > a.txt", "/app")
    async with await backend.create(spec) as sandbox:
        prepared = await prepare(sandbox, task)
        assert set(prepared.entries) == {b"a.txt"}
        assert (await sandbox.exec("git status --porcelain", cwd="/app")).stdout == b""


@pytest.mark.parametrize(
    ("script", "reward", "detail"),
    [
        ('echo \'{"speed": 0.5, "size": 1}\' > /logs/verifier/reward.json; exit 3', 0.625, ""),
        ("echo 0.5 > /logs/verifier/reward.txt", None, "no reward called 'size'"),
        ("exit 0", None, "neither reward.json nor reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", None, "not in [0, 1]"),
        ("ls /solution /logs/verifier/reward* && echo 1 > /logs/verifier/reward.txt; true", None, "neither"),
    ],
)
async def test_rewards_of_a_verifier(backend: SandboxBackend, script: str, reward: float | None, detail: str) -> None:
    task = calc_task(HarborGrading({"test.sh": script.encode()}))
    verdict = await grade(task, b"", backend, options=GradingOptions(weights={"speed": 3, "size": 1}))
    assert verdict.reward == reward
    assert detail in verdict.detail
    assert (verdict.failure is None) == (reward is not None)


async def test_a_fraction_of_the_tests(backend: SandboxBackend) -> None:
    """`add` is right for some numbers only; nothing that worked may break."""
    half = calc_patch(in_add("return 5 if (a, b) == (2, 3) else a - b"))
    fraction = GradingOptions(credit="fraction")
    verdict = await grade(calc_task(), half, backend, options=fraction)
    assert verdict.reward == 0.25
    assert verdict.evidence["rewards"] == {"fail_to_pass": 0.25, "pass_to_pass": 1.0}
    assert (await grade(calc_task(), half, backend)).reward == 0.0
    broken = {"calc/core.py": FIXED.replace("x * 2", "x")}
    assert (await grade(calc_task(), calc_patch(broken), backend, options=fraction)).reward == 0.0
    assert (await grade(calc_task(options=fraction), b"", backend)).reward == 0.0


def verdicts(*rewards: float | None) -> list[Verdict]:
    made = []
    for reward in rewards:
        if reward is None:
            made.append(Verdict(None, FailureKind.GRADER_ERROR, "x"))
        else:
            made.append(Verdict(reward, tests={"t": "passed" if reward == 1 else "failed", "u": "passed"}))
    return made


@pytest.mark.parametrize(
    ("rewards", "reruns", "reward", "runs"),
    [
        ((0.0, 1.0), 0, 0.0, 1),
        ((1.0, 0.0), 2, 1.0, 1),
        ((None, 1.0), 2, None, 1),
        ((0.0, 1.0), 1, 0.0, 1),
        ((0.0, 1.0, 1.0), 2, 1.0, 3),
        ((0.0, 0.0, 1.0), 2, 0.0, 2),
        ((0.0, 1.0, 0.0, 1.0, 1.0), 4, 1.0, 5),
        ((0.0, None, 1.0), 2, 0.0, 2),
    ],
)
async def test_what_most_runs_say_counts(
    rewards: tuple[float | None, ...], reruns: int, reward: float | None, runs: int
) -> None:
    left = verdicts(*rewards)
    count = 0

    async def run() -> Verdict:
        nonlocal count
        count += 1
        return left.pop(0)

    verdict = await repeated(run, reruns)
    assert (verdict.reward, count) == (reward, runs)
    if runs > 1:
        assert [r["reward"] for r in verdict.evidence["reruns"]] == list(rewards[:runs])
        assert verdict.evidence["flaky"] == (["t"] if 1.0 in rewards[:runs] else [])
