"""The other grading forms: command, script and SWE-bench Pro, each with its fix, its bug and its own cheats."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sandlot.errors import FailureKind
from sandlot.grading import grade
from sandlot.grading.bench import Bench
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import CommandGrading, PytestGrading, Repository, Task
from support.cheats import BASE, BUGGY, FIXED, GOLD, HIDDEN, at_import, calc_patch, calc_task, in_add
from support.forms import FORMS, PARSER, SWEPRO
from support.repositories import git, repository, stream

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("form", FORMS)
async def test_fix_is_1_and_bug_is_0(backend: SandboxBackend, form: str) -> None:
    task = calc_task(FORMS[form])
    solved = await grade(task, calc_patch({"calc/core.py": FIXED}), backend)
    assert (solved.reward, solved.detail, solved.failure) == (1.0, "", None), solved.evidence
    assert solved.evidence["form"] == form
    inverted = solved.evidence["countercheck"]
    assert inverted["functions"] >= 2
    assert inverted["reward"] == 0.0
    assert "passed" not in {result for name, result in inverted["tests"].items() if name.endswith(("_add", "_sums"))}
    empty = await grade(task, b"", backend)
    assert (empty.reward, empty.failure) == (0.0, None), empty.evidence
    if form == "swepro":
        assert "ok \ufffd" in solved.evidence["runs"][0]["log"]


async def test_a_command_without_pytest_is_judged_by_its_status(backend: SandboxBackend) -> None:
    command = "python3 -c 'from calc import add; raise SystemExit(add(2, 3) != 5)'"
    task = calc_task(CommandGrading(command))
    assert (await grade(task, calc_patch({"calc/core.py": FIXED}), backend)).reward == 1.0
    assert (await grade(task, b"", backend)).reward == 0.0


async def test_tests_that_are_called_otherwise(backend: SandboxBackend) -> None:
    """The control tests are collected by the repository's own naming rules."""
    files = {"checks/check_core.py": b"from calc import add\n\n\ndef check_add():\n    assert add(2, 3) == 5\n"}
    grading = PytestGrading(files, ("checks/check_core.py::check_add",), timeout=60.0)
    pyproject = '[tool.pytest.ini_options]\npython_functions = ["check_*"]\npython_files = ["check_*.py"]\n'
    task = calc_task(grading, setup=(f"printf '{pyproject}' > pyproject.toml".replace("\n", "\\n"),))
    assert (await grade(task, calc_patch({"calc/core.py": FIXED}).diff, backend)).reward == 1.0
    assert (await grade(task, b"", backend)).reward == 0.0


async def test_a_patch_that_makes_all_tests_disappear_earns_0(backend: SandboxBackend) -> None:
    """Nothing is reported with it, but much without it."""
    verdict = await grade(calc_task(), calc_patch(at_import("raise SystemExit(0)")), backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert verdict.evidence["base"]["reported"] > 0


async def test_a_base_whose_runner_cannot_start_is_ungraded(backend: SandboxBackend) -> None:
    task = calc_task(setup=("printf '[pytest]\\naddopts = --no-such-option\\n' > pytest.ini",))
    for patch in (b"", calc_patch({"calc/core.py": FIXED}).diff):
        verdict = await grade(task, patch, backend)
        assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)


async def test_nothing_parsed_is_ungraded_and_not_0(backend: SandboxBackend) -> None:
    silent = replace(SWEPRO, parser_script="import json, sys\njson.dump({'tests': []}, open(sys.argv[3], 'w'))\n")
    verdict = await grade(calc_task(silent), calc_patch({"calc/core.py": FIXED}), backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)
    assert "no test result" in verdict.detail


@pytest.mark.parametrize("parser", ["raise SystemExit(1)", "open(__import__('sys').argv[3], 'w').write('{')"])
async def test_a_broken_parser_is_ungraded(backend: SandboxBackend, parser: str) -> None:
    verdict = await grade(calc_task(replace(SWEPRO, parser_script=parser)), b"", backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)


async def test_a_patch_that_does_not_apply_is_ungraded(backend: SandboxBackend) -> None:
    patch = b"--- a/calc/core.py\n+++ b/calc/core.py\n@@ -1 +1 @@\n-nothing like it\n+x\n"
    verdict = await grade(calc_task(), patch, backend)
    assert (verdict.reward, verdict.failure) == (None, FailureKind.GRADER_ERROR)
    assert "does not apply" in verdict.detail


async def test_a_task_whose_setup_fails_is_ungraded(backend: SandboxBackend) -> None:
    verdict = await grade(calc_task(setup=("exit 3",)), b"", backend)
    assert verdict.reward is None
    assert "the set-up command 'exit 3' failed" in verdict.detail


async def test_tests_checked_out_of_the_future_are_the_graders_alone(backend: SandboxBackend, tmp_path: Path) -> None:
    """The last line of `before_repo_set_cmd` brings the tests: they win over what the patch says of them."""
    files = dict(HIDDEN)
    origin = repository(tmp_path / "origin", BASE, {"calc/core.py": FIXED, **files}, branch="main")
    base, future = git(origin, "rev-parse", "HEAD~1").strip(), git(origin, "rev-parse", "HEAD").strip()
    before = f"git reset --hard {base}\ngit clean -fd\ngit checkout {base}\ngit checkout {future} -- {' '.join(files)}"
    source = Repository(fast_export=stream(origin, tmp_path / "repo.fi"), base=base)
    task = Task(
        "pro", "x", replace(SWEPRO, files={}, before_repo_set_cmd=before), repository=source, workdir="/workspace/p"
    )
    weak = {"tests/test_core.py": "def test_add(): pass\n", "tests/test_more.py": "x = 1\n"}
    patch = calc_patch(weak)
    assert (await grade(task, patch.diff, backend)).reward == 0.0
    assert (await grade(task, calc_patch({"calc/core.py": FIXED, **weak}).diff, backend)).reward == 1.0


async def test_evidence_is_text_and_json(backend: SandboxBackend) -> None:
    noise = base64.b64encode(b"ok \xff\xf0\x9f end").decode()
    code = f"import base64, os\nos.write(1, base64.b64decode({noise!r}))\nos.write(2, b'\\xe2\\x82')\nreturn a - b"
    verdict = await grade(calc_task(), calc_patch(in_add(code)), backend)
    assert verdict.reward == 0.0
    assert "ok \ufffd\ufffd end" in verdict.evidence["runs"][0]["log"]
    assert json.loads(json.dumps(verdict.evidence)) == verdict.evidence


async def test_grading_twice_says_the_same(backend: SandboxBackend) -> None:
    patch = calc_patch({"calc/core.py": FIXED})
    first, second = [await grade(calc_task(), patch, backend) for _ in range(2)]
    assert (first.reward, first.tests) == (second.reward, second.tests)


async def test_a_log_that_breaks_the_parser_is_the_patchs_doing(backend: SandboxBackend) -> None:
    parser = PARSER.replace("found = ", "assert 'BOOM' not in out\nfound = ", 1)
    task = calc_task(replace(SWEPRO, parser_script=parser))
    loud = calc_patch({"calc/core.py": BUGGY.replace("return a - b", "print('BOOM'); return a - b")}).diff
    verdict = await grade(task, loud, backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert "the parser gave no readable result" in verdict.detail
    assert (await grade(task, GOLD, backend)).reward == 1.0


FINDS_THE_PARSERS_PLACE = """
import os
pid = os.getppid()
while pid > 1:
    for word in open(f"/proc/{pid}/cmdline").read().split("\\0"):
        if word.startswith("/tmp/swepro-"):
            open(os.path.dirname(word) + "-parser", "w").close()
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
"""


async def test_the_parsers_place_cannot_be_taken(backend: SandboxBackend) -> None:
    verdict = await grade(calc_task(SWEPRO), calc_patch(at_import(FINDS_THE_PARSERS_PLACE)), backend)
    assert (verdict.reward, verdict.failure) == (0.0, None), verdict.detail


LEFT_BEHIND = {
    "settings": "open('/tmp/pytest.ini', 'w').write('[pytest]\\naddopts = --no-such-option\\n')",
    "a conftest": "os.makedirs('/tmp/control'); open('/tmp/control/conftest.py', 'w').write('raise SystemExit(3)')",
    "a file": "open('/tmp/control', 'w').close()",
}


@pytest.mark.parametrize("left", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
@pytest.mark.parametrize("form", ["pytest", "script"])
async def test_nobody_is_ungraded_by_what_it_leaves_and_its_own_end(
    backend: SandboxBackend, form: str, left: str
) -> None:
    patch = calc_patch(at_import(f"import os; {left}; os.kill(os.getpid(), 9)"))
    verdict = await grade(calc_task(FORMS[form]), patch, backend)
    assert (verdict.reward, verdict.failure) == (0.0, None), verdict.detail


async def test_where_nothing_can_be_run_after_the_tests_the_base_tells(
    backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fault(bench: Bench) -> str:
        return "no room is left"

    monkeypatch.setattr(Bench, "_control_fault", fault)
    killed = calc_patch(at_import("import os; os.kill(os.getpid(), 9)"))
    verdict = await grade(calc_task(), killed, backend)
    assert (verdict.reward, verdict.failure) == (0.0, None)
    assert verdict.detail.startswith("nothing can be run in the sandbox after the tests: no room is left; ")
