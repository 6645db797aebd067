"""Every bundled task is what it says: its history, its visible tests, its hidden tests and its gold patch."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from sandlot.tasks.load import load_tasks
from sandlot.tasks.rows import test_checkouts
from sandlot.tasks.task import CommandGrading, PytestGrading, ScriptGrading, SweProGrading, Task

TASKS = {task.id: task for task in load_tasks("bundled")}
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def run(*argv: str | Path, cwd: Path, check: bool = True, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command with nothing of this process's configuration, and `python3` of this interpreter."""
    env = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(cwd),
        "LANG": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(argv, cwd=cwd, env=env, input=stdin, capture_output=True, timeout=120)
    assert not check or done.returncode == 0, f"{argv}: {(done.stdout + done.stderr).decode()}"
    return done


def git(repo: Path, *arguments: str, stdin: bytes = b"") -> str:
    return run("git", *arguments, cwd=repo, stdin=stdin).stdout.decode()


def base_of(task: Task) -> str:
    assert task.repository is not None
    return task.repository.base


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Repositories by task, filled as they are asked for."""
    return {"": tmp_path_factory.mktemp("bundled")}


@pytest.fixture
def repo(task: Task, repositories: dict[str, Path]) -> Path:
    """The task's whole repository, at its base. Tests share it and leave it clean."""
    if task.id not in repositories:
        assert task.repository is not None
        assert task.repository.fast_export is not None
        path = repositories[""] / task.id / "repo"
        path.mkdir(parents=True)
        git(path, "init", "-q", "-b", "elsewhere")
        git(path, "fast-import", "--quiet", stdin=task.repository.fast_export.read_bytes())
        git(path, "checkout", "-q", "--detach", base_of(task))
        repositories[task.id] = path
    return repositories[task.id]


def reset(repo: Path, task: Task) -> None:
    git(repo, "checkout", "-q", "-f", base_of(task))
    git(repo, "clean", "-fdq")


def put(repo: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes(content)


def passed(repo: Path, paths: Iterable[str]) -> dict[str, bool]:
    """Node ids of all tests in `paths`, and whether each passed."""
    report = repo.parent / "junit.xml"
    run(*PYTEST, "-o", "junit_family=xunit1", f"--junitxml={report}", *paths, cwd=repo, check=False)
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if (file := case.get("file")) is not None:
            results[f"{file}::{case.get('name')}"] = not [child for child in case if child.tag != "properties"]
    return results


def solved(task: Task, repo: Path) -> bool:
    """Whether what is in `repo` passes the task's hidden tests, judged with plain tools."""
    grading = task.grading
    if isinstance(grading, PytestGrading):
        put(repo, grading.files)
        results = passed(repo, grading.files)
        assert set(results) == {*grading.fail_to_pass, *grading.pass_to_pass}
        assert all(results[name] for name in grading.pass_to_pass)
        outcomes = {results[name] for name in grading.fail_to_pass}
        assert len(outcomes) == 1, "some of fail_to_pass pass, others do not"
        return outcomes == {True}
    if isinstance(grading, CommandGrading):
        put(repo, grading.files)
        return run("bash", "-c", grading.command, cwd=repo, check=False).returncode == 0
    if isinstance(grading, ScriptGrading):
        script = repo.parent / "f2p_script.py"
        script.write_text(grading.script, encoding="utf-8")
        return run("python3", script, cwd=repo, check=False).returncode == 0
    for revision, paths in test_checkouts(grading.before_repo_set_cmd):
        git(repo, "checkout", "-q", revision, "--", *paths)
    results = swepro_statuses(grading, repo)
    assert all(results[name] == "PASSED" for name in grading.pass_to_pass)
    outcomes = {results[name] == "PASSED" for name in grading.fail_to_pass}
    assert len(outcomes) == 1, "some of fail_to_pass pass, others do not"
    return outcomes == {True}


def swepro_statuses(grading: SweProGrading, repo: Path) -> dict[str, str]:
    """Statuses by test name, out of the row's run script and parser."""
    room = repo.parent
    (room / "run_script.sh").write_text(grading.run_script)
    (room / "parser.py").write_text(grading.parser_script)
    done = run("bash", room / "run_script.sh", ",".join(grading.selected_test_files), cwd=repo, check=False)
    (room / "out").write_bytes(done.stdout)
    (room / "err").write_bytes(done.stderr)
    run("python3", room / "parser.py", room / "out", room / "err", room / "result.json", cwd=repo)
    tests = json.loads((room / "result.json").read_text())["tests"]
    return {test["name"]: test["status"] for test in tests}


def test_there_are_enough_of_every_kind() -> None:
    forms = Counter(type(task.grading).__name__ for task in TASKS.values())
    assert forms["PytestGrading"] >= 12
    assert all(forms[form.__name__] for form in (CommandGrading, ScriptGrading, SweProGrading))
    assert {task.metadata["difficulty"] for task in TASKS.values()} == {"trivial", "easy", "medium", "hard"}


def test_titles_are_unique() -> None:
    titles = [task.statement.splitlines()[0] for task in TASKS.values()]
    assert len(set(titles)) == len(TASKS)
    assert all(title.startswith("# ") for title in titles)


@every_task
def test_statement_is_short_and_keeps_the_solution_to_itself(task: Task) -> None:
    assert 40 <= len(task.statement.split()) <= 250
    assert task.gold_patch is not None
    added = {line[1:].strip() for line in task.gold_patch.decode().splitlines() if re.match(r"\+[^+]", line)}
    told = {line.strip(" `") for line in task.statement.splitlines()}
    assert not {line for line in added & told if len(line) > 8}


@every_task
def test_history(task: Task, repo: Path) -> None:
    base = base_of(task)
    assert 3 <= int(git(repo, "rev-list", "--count", "refs/heads/main")) <= 8
    assert git(repo, "rev-list", "--count", f"{base}..refs/heads/main").strip() == "1", "the future must be there"
    git(repo, "merge-base", "--is-ancestor", base, "refs/heads/main")
    people = set(git(repo, "log", "--all", "--format=%an <%ae>%n%cn <%ce>").splitlines())
    assert people == {"Sandlot Authors <authors@sandlot.invalid>"}
    dates = git(repo, "log", "--reverse", "--format=%aI", "refs/heads/main").splitlines()
    assert dates == sorted(dates)
    assert all(date.startswith("2024-") for date in dates)


@every_task
def test_package_is_small_and_runs_on_python_3_9(task: Task, repo: Path) -> None:
    names = git(repo, "ls-tree", "-r", "--name-only", base_of(task)).split()
    assert "README.md" in names
    lines = 0
    for name in git(repo, "ls-tree", "-r", "--name-only", "refs/heads/main").split():
        if name.endswith(".py"):
            source = git(repo, "show", f"refs/heads/main:{name}")
            ast.parse(source, feature_version=(3, 9))
            lines += 0 if name.startswith("tests/") else len(source.splitlines())
    assert 60 <= lines <= 400


@every_task
def test_gold_patch_is_the_fix_without_its_tests(task: Task, repo: Path) -> None:
    fix = git(repo, "diff", "--binary", base_of(task), "refs/heads/main", "--", ".", ":(exclude)tests")
    assert task.gold_patch == fix.encode()
    git(repo, "apply", "--check", stdin=task.gold_patch)


@every_task
def test_hidden_tests_are_not_in_the_base(task: Task, repo: Path) -> None:
    new = git(repo, "diff", "--name-status", base_of(task), "refs/heads/main", "--", "tests").split("\n")
    hidden = [line.split("\t")[1] for line in new if line]
    assert hidden
    assert all(line.startswith("A\t") for line in new if line)
    if isinstance(task.grading, PytestGrading):
        assert {name.split("::")[0] for name in task.grading.fail_to_pass} <= set(hidden)
    known = set(re.findall(r"def (test_\w+)", git(repo, "grep", "-h", "def test_", base_of(task), "--", "tests")))
    for name in hidden:
        assert known.isdisjoint(re.findall(r"def (test_\w+)", git(repo, "show", f"refs/heads/main:{name}")))


@every_task
def test_only_the_gold_patch_solves(task: Task, repo: Path) -> None:
    visible = git(repo, "ls-files", "tests").split()
    assert visible
    if isinstance(task.grading, PytestGrading):
        # Judging runs the visible tests too, unchanged, and requires all of them to pass before and after.
        assert all(task.grading.files[name] == (repo / name).read_bytes() for name in visible)
    else:
        assert all(passed(repo, visible).values()), "a visible test fails at the base"
    assert not solved(task, repo), "nothing was changed, and yet it counts as solved"
    reset(repo, task)
    assert task.gold_patch is not None
    git(repo, "apply", stdin=task.gold_patch)
    assert solved(task, repo)
    if not isinstance(task.grading, PytestGrading):
        assert all(passed(repo, visible).values()), "the gold patch breaks a visible test"
    reset(repo, task)
