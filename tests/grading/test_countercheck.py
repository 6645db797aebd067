"""What is graded by inverted tests too: what that shows of a patch, what it never says of an honest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from sandlot.errors import FailureKind
from sandlot.grading import Verdict, grade
from sandlot.grading.command import with_tests
from sandlot.grading.countercheck import counterchecked
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import CommandGrading, GradingOptions, PytestGrading, Task
from support.cheats import CHEATS, FIXED, GOLD, GRADING, HIDDEN, calc_patch, calc_task
from support.forms import FORMS

pytestmark = pytest.mark.asyncio(loop_scope="module")
OFF = GradingOptions(countercheck=False)
TESTS = {"t.py": b"def test_a():\n    assert f() == 1\n\n\ndef test_b():\n    assert f()\n"}
NAMES = ("t.py::test_a", "t.py::test_b")
OTHER = {"u.py::test_a": "passed"}


@pytest.mark.parametrize(
    ("form", "cheat"),
    [
        ("pytest", "tells_the_whole_run"),
        ("swepro", "tells_the_whole_run"),
        ("command", "fakes_a_session_in_pytests_place"),
    ],
)
async def test_without_it_a_report_written_for_the_witness_would_be_believed(
    backend: SandboxBackend, form: str, cheat: str
) -> None:
    """This is what it is for: nothing else tells this run from a good one."""
    task, patch = calc_task(FORMS[form]), calc_patch(CHEATS[cheat])
    assert (await grade(task, patch, backend, options=OFF)).reward == 1.0
    verdict = await grade(task, patch, backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert "passes with its assertions inverted too" in verdict.detail
    assert verdict.evidence["countercheck"]["tests"]["tests/test_core.py::test_add"] == "passed"


async def test_tests_that_a_command_writes_itself_are_inverted_there(backend: SandboxBackend) -> None:
    written = "".join(f"cat > ./{path} <<'EOF'\n{text.decode()}EOF\n" for path, text in HIDDEN.items())
    task = calc_task(CommandGrading(f"cd /workspace/calc\n{written}python3 -m pytest -q {' '.join(HIDDEN)}"))
    assert (await grade(task, GOLD, backend)).reward == 1.0
    patch = calc_patch(CHEATS["fakes_a_session_in_pytests_place"])
    assert (await grade(task, patch, backend, options=OFF)).reward == 1.0
    verdict = await grade(task, patch, backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert "passes with its assertions inverted too" in verdict.detail


@pytest.mark.parametrize(
    ("head", "path"),
    [
        ("cat > tests/test_a.py <<'EOF'", "tests/test_a.py"),
        ("mkdir -p tests && cat <<EOF >./tests/test_a.py", "tests/test_a.py"),
        ('cat << "EOF" > "/repo/tests/test_a.py"', "tests/test_a.py"),
        ("tee /dev/null <<-EOF > /elsewhere/test_a.py && true", "/elsewhere/test_a.py"),
        ("python3 - <<'EOF'", None),
        ("cat > notes.txt <<'EOF'", None),
        ('cat > "$DIR"/test_a.py <<EOF', None),
    ],
)
async def test_here_documents_that_are_python_files_are_found(head: str, path: str | None) -> None:
    body = "def test_a():\n    assert 'EOF'\n"
    told: dict[str, bytes] = {}

    def other(path: str, content: bytes) -> bytes:
        told[path] = content
        return b"pass\n"

    command = f"set -e\n{head}\n{body}EOF\npytest -q\n"
    assert with_tests(command, "/repo", other) == (command.replace(body, "pass\n") if path else command)
    assert told == ({path: body.encode()} if path else {})


async def test_a_test_that_asserts_nothing_speaks_against_nobody(backend: SandboxBackend) -> None:
    """The known solution passes it inverted, too: a decorator takes every failure away."""
    source = b"""\
import functools
def quiet(test):
    @functools.wraps(test)
    def run():
        try: test()
        except AssertionError: pass
    return run

@quiet
def test_add():
    import calc
    assert calc.add(1, 1) == 2
    if calc.add(1, 1) != 2: raise ValueError
"""
    grading = PytestGrading({"tests/test_core.py": source}, ("tests/test_core.py::test_add",), timeout=60.0)
    verdict = await grade(calc_task(grading), calc_patch({"calc/core.py": FIXED}), backend)
    assert (verdict.reward, verdict.detail) == (1.0, "")
    assert verdict.evidence["countercheck"]["tests"] == {"tests/test_core.py::test_add": "passed"}


async def test_a_command_that_asserts_nothing_is_not_accused_without_a_known_solution(backend: SandboxBackend) -> None:
    task = calc_task(CommandGrading("true", {"tests/test_x.py": TESTS["t.py"]}), gold_patch=None)
    assert (await grade(task, b"", backend)).reward == 1.0


def verdict(tests: dict[str, str], reward: float | None = None, failure: FailureKind | None = None) -> Verdict:
    solved = float(all(outcome == "passed" for outcome in tests.values()))
    return Verdict(solved if reward is None and failure is None else reward, failure, tests=tests)


def results(*outcomes: str) -> dict[str, str]:
    return dict(zip(NAMES, outcomes, strict=True))


GOOD = verdict(results("passed", "passed"))
LOST = verdict({}, failure=FailureKind.INFRA_ERROR)
BAD = verdict(results("failed", "failed"))


@pytest.mark.parametrize(
    ("first", "again", "known", "reward", "detail", "runs"),
    [
        (GOOD, BAD, None, 1.0, "", 1),
        (GOOD, verdict({}, failure=FailureKind.GRADER_ERROR), None, 1.0, "", 1),
        (GOOD, LOST, None, None, "", 1),
        (GOOD, verdict(results("failed", "passed")), [LOST], None, "", 2),
        (verdict(results("passed", "skipped"), 1.0), BAD, [LOST], None, "", 2),
        (GOOD, verdict(results("failed", "passed")), [BAD], 0.0, "test_b passes with its assertions inverted too", 2),
        (GOOD, verdict(results("failed", "passed")), [verdict(results("failed", "passed"))], 1.0, "", 2),
        (GOOD, verdict(results("passed", "failed")), None, 0.0, "test_a passes with its assertions inverted too", 1),
        (verdict({**GOOD.tests, **OTHER}), verdict({**BAD.tests, **OTHER}), None, 1.0, "", 1),
        (verdict({}, 1.0), verdict({}, 0.0), [], 1.0, "", 1),
        (verdict({}, 0.5), verdict({}, 0.5), [verdict({}, 0.25)], 0.0, "the reward is the same", 2),
        (verdict({}, 0.5), verdict({}, 0.5), [verdict({}, 0.5)], 0.5, "", 2),
        (verdict({}, 1.0), verdict({}, 1.0), None, 1.0, "", 1),
        (verdict(results("passed", "skipped"), 1.0), BAD, [GOOD], 0.0, "test_b was skipped, but passes with", 2),
        (verdict(results("passed", "skipped"), 1.0), BAD, [verdict(results("passed", "skipped"))], 1.0, "", 2),
        (verdict(results("passed", "skipped"), 1.0), BAD, None, 1.0, "", 1),
    ],
)
async def test_the_rule(
    first: Verdict, again: Verdict, known: list[Verdict] | None, reward: float | None, detail: str, runs: int
) -> None:
    task = Task("x", "x", replace(GRADING, fail_to_pass=NAMES), gold_patch=None if known is None else b"gold")
    left, count = list(known or ()), 0

    async def run(patch: bytes | None, instead: Mapping[str, bytes]) -> Verdict:
        nonlocal count
        count += 1
        return again if patch is None else left.pop(0)

    found = await counterchecked(task, first, TESTS, run)
    assert (found.reward, count) == (reward, runs)
    assert detail in found.detail
    assert left == []


async def test_a_countercheck_that_breaks_leaves_the_patch_ungraded(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **options: object) -> None:
        raise IndexError("no such thing")

    monkeypatch.setattr("sandlot.grading.countercheck.inverted", breaks)
    found = await grade(calc_task(), calc_patch({"calc/core.py": FIXED}), backend)
    assert (found.reward, found.failure) == (None, FailureKind.GRADER_ERROR)
    assert "the countercheck failed: IndexError" in found.detail


async def test_nothing_is_run_again_where_nothing_can_be_inverted() -> None:
    async def run(patch: bytes | None, instead: Mapping[str, bytes]) -> Verdict:
        raise AssertionError

    task = Task("x", "x", replace(GRADING, fail_to_pass=("spec.js | adds",)))
    found = await counterchecked(task, GOOD, {"spec.js": b"it('adds')"}, run)
    assert (found.reward, found.evidence["countercheck"]) == (1.0, {"functions": 0})
