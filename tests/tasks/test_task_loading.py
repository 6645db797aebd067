"""Task directories and coding-agent rows: what loads, and how each bad one is refused."""

import json
from pathlib import Path

import pytest

from sandlot.errors import TaskError
from sandlot.tasks import (
    LOADERS,
    CommandGrading,
    PytestGrading,
    ScriptGrading,
    SweProGrading,
    TaskLimits,
    load_tasks,
)
from sandlot.tasks.rows import test_checkouts as checkouts

GOOD = """\
schema = 1
difficulty = "easy"
description = "A small one."
[repository]
fast_export = "repo.fi"
base = "refs/heads/base"
[grading]
form = "pytest"
files = "tests"
fail_to_pass = ["tests/test_a.py::test_one"]
"""


def task_directory(root: Path, name: str = "one", toml: str = GOOD) -> Path:
    path = root / name
    (path / "tests").mkdir(parents=True)
    (path / "task.toml").write_text(toml)
    (path / "statement.md").write_text("Fix it.\n")
    (path / "repo.fi").write_text("")
    (path / "tests" / "test_a.py").write_text("def test_one(): pass\n")
    return path


def test_a_task_directory_loads_whole(tmp_path: Path) -> None:
    path = task_directory(tmp_path)
    (path / "gold.patch").write_bytes(b"\xff\r\n")
    (task,) = load_tasks(path)
    assert (task.id, task.workdir, task.image) == ("one", "/workspace/one", "host")
    assert isinstance(task.grading, PytestGrading)
    assert task.grading.files == {"tests/test_a.py": b"def test_one(): pass\n"}
    assert task.gold_patch == b"\xff\r\n"
    assert task.repository is not None
    assert task.repository.fast_export == path / "repo.fi"
    assert task.limits == TaskLimits()


def test_a_directory_of_task_directories_loads_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        task_directory(tmp_path, name)
    (tmp_path / "notes").mkdir()
    assert [task.id for task in load_tasks(tmp_path)] == ["a", "b"]


def test_limits_setup_and_command_form(tmp_path: Path) -> None:
    toml = """\
schema = 1
difficulty = "hard"
description = "x"
workdir = "/srv/x"
setup = ["touch built"]
protected = ["fixtures/*"]
repository = {directory = "repo"}
grading = {form = "command", command = "make test", timeout = 5}
limits = {turns = 3, wall_clock = 1.5}
"""
    path = task_directory(tmp_path, toml=toml)
    (path / "repo").mkdir()
    (task,) = load_tasks(path)
    assert task.grading == CommandGrading("make test", {}, 5.0)
    assert task.limits == TaskLimits(wall_clock=1.5, turns=3)
    assert (task.setup, task.protected, task.workdir) == (("touch built",), ("fixtures/*",), "/srv/x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("schema = 1", "schema = 2"), "schema"),
        (("schema = 1", 'schema = 1\nshcema = "x"'), "shcema: Extra inputs"),
        (('"easy"', '"odd"'), "difficulty"),
        (('form = "pytest"', 'form = "jest"'), "grading"),
        (('form = "pytest"', 'form = "pytest"\nextra = 1'), "grading.pytest.extra: Extra inputs"),
        (('["tests/test_a.py::test_one"]', "[]"), "grading.pytest.fail_to_pass"),
        (('["tests/test_a.py::test_one"]', '["tests/test_b.py::test_one"]'), "is in no file"),
        (('files = "tests"', 'files = "none"'), "does not exist"),
        (('files = "tests"', 'files = "../.."'), "leads out"),
        (('fast_export = "repo.fi"', 'fast_export = "repo.fi"\ndirectory = "tests"'), "exactly one"),
        (('fast_export = "repo.fi"', 'fast_export = "tests"'), "wrong kind"),
        (('[repository]\nfast_export = "repo.fi"\nbase = "refs/heads/base"', ""), "repository"),
        (("schema = 1", 'schema = 1\nworkdir = "x/y"'), "workdir: must be an absolute path"),
        (("schema = 1", 'schema = 1\nworkdir = "/"'), "workdir"),
        (('files = "tests"', 'files = "tests"\ntimeout = 0'), "timeout"),
        (('files = "tests"', 'files = "tests"\ntimeout = inf'), "timeout"),
        (("schema = 1", "schema = "), "not readable as TOML"),
        (("[grading]", "[limits]\nturns = 0\n[grading]"), "limits.turns"),
        (("[grading]", "[limits]\nsteps = 9\n[grading]"), "limits.steps: Extra inputs"),
    ],
)
def test_a_bad_task_file_is_refused_with_file_and_field(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    assert change[0] in GOOD
    path = task_directory(tmp_path, toml=GOOD.replace(*change))
    with pytest.raises(TaskError) as refused:
        load_tasks(path)
    assert str(path / "task.toml") in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", [None, "  \n"])
def test_a_task_needs_a_statement(tmp_path: Path, text: str | None) -> None:
    path = task_directory(tmp_path)
    (path / "statement.md").unlink() if text is None else (path / "statement.md").write_text(text)
    with pytest.raises(TaskError, match=r"statement\.md"):
        load_tasks(path)


def row(**metadata: object) -> dict[str, object]:
    base = {"image": "registry.example/x:1", "workdir": "/workspace/x", "problem_statement": "Fix."}
    return {"prompt": "fallback", "label": "x-1", "metadata": {**base, **metadata}}


def rows(tmp_path: Path, *values: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


SWEPRO = {
    "run_script": "pytest",
    "parser_script": "print()",
    "FAIL_TO_PASS": '["t.py::a"]',
    "PASS_TO_PASS": ["t.py::b"],
    "selected_test_files_to_run": '["t.py"]',
    "before_repo_set_cmd": "git reset --hard abc\ngit clean -fd\ngit checkout abc\ngit checkout def1 -- t.py u/v.py",
    "base_commit": "abc",
}


def test_the_three_forms_of_rows(tmp_path: Path) -> None:
    command, script, pro = load_tasks(
        rows(
            tmp_path,
            row(eval_cmd="pytest -x t.py", instance_id="a"),
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "From the prompt"}]}],
                "label": "b",
                "metadata": {
                    "remote_env_info": {
                        "image_url": "r/y:2",
                        "workdir": "/testbed",
                        "f2p_script": "import pytest",
                        "pre_commands": "git checkout abc -f\\necho done",
                    }
                },
            },
            row(swepro=SWEPRO, eval_cmd="not this one", instance_id="c"),
        )
    )
    assert command.grading == CommandGrading("pytest -x t.py")
    assert script.grading == ScriptGrading("import pytest")
    assert (script.id, script.image, script.workdir) == ("b", "r/y:2", "/testbed")
    assert script.statement == "From the prompt"
    assert script.setup == ("git checkout abc -f\necho done",)
    assert isinstance(pro.grading, SweProGrading)
    assert (pro.grading.fail_to_pass, pro.grading.pass_to_pass) == (("t.py::a",), ("t.py::b",))
    assert pro.grading.selected_test_files == ("t.py",)
    assert pro.metadata["base_commit"] == "abc"
    assert pro.setup == ()
    assert checkouts(pro.grading.before_repo_set_cmd) == (("def1", ("t.py", "u/v.py")),)


def test_a_row_names_its_repository_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "repo.fi").write_text("")
    where = {"fast_export": "r/repo.fi", "base": "b"}
    (task,) = load_tasks(
        rows(
            tmp_path,
            row(image="host", eval_cmd="true", repository=where, files={"t.py": "x", "b": {"base64": "AAE="}}),
        )
    )
    assert task.repository is not None
    assert (task.repository.fast_export, task.repository.base) == (tmp_path / "r" / "repo.fi", "b")
    assert isinstance(task.grading, CommandGrading)
    assert task.grading.files == {"t.py": b"x", "b": b"\0\1"}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "must be an object"),
        (row(), "has no grader"),
        (row(eval_cmd="x", workdir=None), "metadata.workdir"),
        (row(eval_cmd="x", workdir="../x"), "metadata.workdir"),
        (row(eval_cmd="x", image=None), "metadata.image"),
        (row(eval_cmd="x", image=7), "must be a string"),
        (row(eval_cmd=["x"]), "metadata.eval_cmd: must be a string"),
        (row(eval_cmd="x", image="host"), "metadata.repository"),
        (row(eval_cmd="x", repository={"fast_export": "nope"}), "does not exist"),
        (row(eval_cmd="x", repository={"fast_export": "/etc/passwd"}), "leads out"),
        (row(eval_cmd="x", repository={"url": "u"}), "metadata.repository"),
        (row(eval_cmd="x", files={"../t": "x"}), "leads out"),
        (row(eval_cmd="x", files={"t": 3}), "metadata.files.t"),
        (row(eval_cmd="x", timeout=-1), "metadata.timeout"),
        (row(eval_cmd="x", limits={"turns": "9"}), "metadata.limits.turns"),
        (row(eval_cmd="x", limits={"steps": 9}), "metadata.limits.steps"),
        (row(swepro={**SWEPRO, "FAIL_TO_PASS": "[]"}), "names no test"),
        (row(swepro={**SWEPRO, "FAIL_TO_PASS": "t.py"}), "no JSON list"),
        (row(swepro={**SWEPRO, "FAIL_TO_PASS": [1]}), "list of strings"),
        (row(swepro={**SWEPRO, "run_script": ""}), "run_script"),
        (row(swepro={**SWEPRO, "parser_script": None, "parser_script_path": "no.py"}), "cannot be read"),
        (row(swepro={**SWEPRO, "runscript": "x"}), "runscript"),
        (
            {"prompt": "", "label": "x", "metadata": {"image": "i", "workdir": "/w", "eval_cmd": "x"}},
            "problem_statement",
        ),
        ({"prompt": "p", "label": "x" * 300, "metadata": {"image": "i", "workdir": "/w", "eval_cmd": "x"}}, "label"),
        ({"prompt": "p", "metadata": [1]}, "metadata"),
    ],
)
def test_a_bad_row_is_refused_with_row_and_field(tmp_path: Path, bad: object, reason: str) -> None:
    path = rows(tmp_path, row(eval_cmd="true", instance_id="good"), "", bad)
    with pytest.raises(TaskError) as refused:
        load_tasks(path)
    assert f"{path}: row 3" in str(refused.value)
    assert reason in str(refused.value)


def test_one_id_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="'x-1' is used twice"):
        load_tasks(rows(tmp_path, row(eval_cmd="a"), row(eval_cmd="b")))


@pytest.mark.parametrize("source", ["nowhere", "empty", "file.csv"])
def test_a_source_without_tasks_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").write_text("a,b\n")
    with pytest.raises(TaskError):
        load_tasks(tmp_path / source)


def test_a_loader_can_be_named(tmp_path: Path) -> None:
    path = rows(tmp_path, row(eval_cmd="true")).rename(tmp_path / "rows.txt")
    assert "jsonl" in LOADERS.names()
    assert [task.id for task in load_tasks(f"jsonl:{path}")] == ["x-1"]
