"""Rows of the public data sets: which form they have, what they become, and how each bad one is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sandlot.errors import TaskError
from sandlot.tasks import PytestGrading, R2EGrading, SwebenchGrading, SweProGrading, load_all, load_tasks
from sandlot.tasks.convert import write_rows
from sandlot.tasks.patches import PatchTextError, patch_of_contents, reversed_patch
from sandlot.tasks.swe import test_commands as commands_of
from support.repositories import git, repository, write

PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
TEST_PATCH = PATCH.replace("m.py", "tests/test_m.py")
COMMON = {
    "instance_id": "Owner__repo-12",
    "repo": "owner/repo",
    "base_commit": "a" * 40,
    "problem_statement": "x is wrong",
    "patch": PATCH,
    "version": "1.2",
}
NAMED = {"FAIL_TO_PASS": '["tests/test_m.py::test_x"]', "PASS_TO_PASS": ["tests/test_m.py::test_y[a b]"]}
SWE = {**COMMON, **NAMED, "test_patch": TEST_PATCH, "environment_setup_commit": "b" * 40, "hints_text": "no"}
SMITH = {**COMMON, **NAMED, "image_name": "jyangballin/swesmith.x86_64.repo.abc"}
PRO = {
    **COMMON,
    "fail_to_pass": "[not a list",
    "selected_test_files_to_run": '["tests/test_m.py"]',
    "before_repo_set_cmd": "git checkout aaa\\ngit checkout bbb -- tests/test_m.py",
    "dockerhub_tag": "owner.repo-x",
    "requirements": "It must be 2.",
    "interface": "",
    "run_script": "pytest",
    "parser_script": "print()",
}
R2E = {
    "repo_name": "repo",
    "docker_image": "namanjain12/repo_final:abc",
    "commit_hash": "c" * 40,
    "problem_statement": "[ISSUE]\nx is wrong\n[/ISSUE]",
    "expected_output_json": json.dumps({"\x1b[1mTestM.test_x\x1b[0m": "PASSED", "test_old - reason": "FAILED"}),
    "execution_result_content": json.dumps({"test_file_codes": ["import m"], "test_file_names": ["test_1.py"]}),
    "parsed_commit_content": json.dumps(
        {
            "file_diffs": [
                {"header": {"file": {"path": "m.py"}}, "old_file_content": "x = 1\n", "new_file_content": "x = 2\n"},
                {"header": {"file": {"path": "tests/t.py"}}, "old_file_content": "", "new_file_content": "y\n"},
            ]
        }
    ),
}
NEMOTRON = {
    "responses_create_params": {
        "input": [],
        "metadata": {
            "instance_id": "Owner__repo-12",
            "golden_patch": PATCH,
            "instance_dict": json.dumps({k: v for k, v in SWE.items() if k != "patch"}),
        },
    }
}


def jsonl(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "image", "python"),
    [
        (SWE, "swebench/sweb.eval.x86_64.owner_1776_repo-12:latest", "/opt/miniconda3/envs/testbed/bin/python"),
        ({**SWE, "test_cmds": ["pytest -rA"], "log_parser": "pytest"}, "starryzhang/sweb.eval.x86_64.owner_1776_", ""),
        ({**SWE, "repo": "dask/dask"}, "xingyaoww/sweb.eval.x86_64.owner_s_repo-12:latest", "/opt/miniconda3"),
        ({**SWE, "install_config": {}, "docker_image": "swerebench/x:1"}, "swerebench/x:1", "/opt/miniconda3"),
        (NEMOTRON, "swebench/sweb.eval.x86_64.owner_1776_repo-12:latest", "/opt/miniconda3"),
    ],
)
def test_the_swe_bench_family(tmp_path: Path, row: dict[str, Any], image: str, python: str) -> None:
    (task,) = load_tasks(jsonl(tmp_path, row))
    assert (task.id, task.workdir, task.statement) == ("Owner__repo-12", "/testbed", "x is wrong")
    assert task.image.startswith(image)
    assert task.python.startswith(python)
    assert task.gold_patch == PATCH.encode()
    assert task.metadata["base_commit"] == "a" * 40
    assert "hints_text" not in task.metadata
    assert task.grading == SwebenchGrading(
        TEST_PATCH.encode(), ("tests/test_m.py::test_x",), ("tests/test_m.py::test_y[a b]",)
    )


def test_rows_of_other_runners_are_read_by_the_official_parsers(tmp_path: Path) -> None:
    script = "\n".join(
        (
            "#!/bin/bash",
            "source /opt/miniconda3/bin/activate",
            "git checkout aaa tests/test_m.py",
            "git apply -v - <<'EOF_1'",
            "diff --git a/x b/x",
            "EOF_1",
            ": '>>>>> Start Test Output'",
            "./bin/test m",
            ": '>>>>> End Test Output'",
            "git checkout aaa tests/test_m.py",
        )
    )
    row = {**SWE, "FAIL_TO_PASS": ["test_x (m.C)"], "eval_script": script, "log_parser": "parse_log_django"}
    (task,) = load_tasks(jsonl(tmp_path, row))
    assert isinstance(task.grading, SwebenchGrading)
    assert task.grading.log_parser == "parse_log_django"
    assert task.grading.command.splitlines()[1:] == ["source /opt/miniconda3/bin/activate", "./bin/test m"]
    assert commands_of(script) == task.grading.command


def test_a_smith_row_is_solved_by_the_reverse_of_its_patch(tmp_path: Path) -> None:
    (task,) = load_tasks(jsonl(tmp_path, SMITH))
    assert isinstance(task.grading, PytestGrading)
    assert task.grading.base_files == ("tests/test_m.py",)
    assert task.mutation is not None
    assert (task.mutation.patch, task.mutation.removed) == (PATCH.encode(), ("tests/test_m.py",))
    assert task.gold_patch == PATCH.replace("-x = 1\n+x = 2", "+x = 1\n-x = 2").encode()


def test_a_pro_row(tmp_path: Path) -> None:
    (task,) = load_tasks(jsonl(tmp_path, {**PRO, "fail_to_pass": "['tests/test_m.py | test x']"}))
    assert (task.image, task.workdir) == ("jefzda/sweap-images:owner.repo-x", "/app")
    assert isinstance(task.grading, SweProGrading)
    assert task.grading.selected_test_files == ("tests/test_m.py",)
    assert task.grading.before_repo_set_cmd.splitlines()[1] == "git checkout bbb -- tests/test_m.py"
    assert task.statement == "x is wrong\n\nRequirements:\nIt must be 2."


def test_a_pro_rows_scripts_lie_beside_the_file(tmp_path: Path) -> None:
    row = {**PRO, "fail_to_pass": '["t"]', "run_script": None, "parser_script": None}
    with pytest.raises(
        TaskError, match=r"row 1: run_script: is no text of the row, and .*run_script.sh' cannot be read"
    ):
        load_tasks(jsonl(tmp_path, row))
    write(tmp_path / "run_scripts" / "Owner__repo-12", {"run_script.sh": "go\n", "parser.py": "pass\n"})
    (task,) = load_tasks(jsonl(tmp_path, row))
    assert isinstance(task.grading, SweProGrading)
    assert (task.grading.run_script, task.grading.parser_script) == ("go\n", "pass\n")


def test_an_r2e_row(tmp_path: Path) -> None:
    (task,) = load_tasks(jsonl(tmp_path, R2E))
    assert (task.id, task.statement) == ("repo-cccccccccccc", "x is wrong")
    assert task.grading == R2EGrading(
        {"TestM.test_x": "PASSED", "test_old": "FAILED"}, {"r2e_tests/test_1.py": b"import m"}
    )
    assert task.gold_patch is not None
    assert b"+x = 2" in task.gold_patch
    assert b"tests/t.py" not in task.gold_patch
    assert "/r2e_tests" in task.hidden
    (other,) = load_tasks(jsonl(tmp_path, {**R2E, "execution_result_content": None}))
    assert isinstance(other.grading, R2EGrading)
    assert other.grading.image_tests == "/r2e_tests"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**SWE, "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: names no test"),
        ({**SWE, "FAIL_TO_PASS": "tests"}, "FAIL_TO_PASS: is text, but no JSON list"),
        ({**SWE, "FAIL_TO_PASS": [" "]}, "FAIL_TO_PASS: has a blank name"),
        ({**SWE, "repository": {"directory": "a\0b"}}, "repository.directory: 'a\\x00b' is no path"),
        ({**SWE, "repository": {"directory": "x" * 5000}}, "is no path"),
        ({**SWE, "PASS_TO_PASS": [3]}, "PASS_TO_PASS: must be a list of strings"),
        ({**SWE, "FAIL_TO_PASS": ["test_x (m.C)"]}, "FAIL_TO_PASS: 'test_x (m.C)' is no pytest name"),
        ({**SWE, "PASS_TO_PASS": ["[100%]"]}, "PASS_TO_PASS: '[100%]' is no pytest name"),
        ({**SWE, "eval_script": "x", "log_parser": "y", "eval_type": "fail_only"}, "eval_type: fail_only"),
        ({**SWE, "test_patch": ""}, "test_patch: is missing"),
        ({**SWE, "problem_statement": None}, "problem_statement: is missing"),
        ({**SWE, "instance_id": 3}, "instance_id: must be a string"),
        ({**SWE, "timeout": "9"}, "timeout: must be a positive number"),
        ({**SWE, "timeout": 10**400}, "timeout: must be a positive number"),
        ({**SWE, "workdir": "x"}, "workdir: must be an absolute path"),
        ({**SWE, "image": "host"}, "repository: the image 'host' holds no repository"),
        ({**SWE, "repository": {"directory": "no"}}, "repository.directory: 'no' does not exist"),
        ({**SWE, "options": {"credit": "some"}}, "options: credit must be"),
        ({**SWE, "options": {"reruns": -1}}, "options: reruns must be"),
        ({**SWE, "options": {"weights": {"a": float("nan")}}}, "options: weights must"),
        ({**SMITH, "patch": "GIT binary patch"}, "patch: has a binary part"),
        ({**SMITH, "patch": "nothing"}, "patch: has no hunk"),
        ({**SMITH, "FAIL_TO_PASS": ["TestGo"]}, "only rows of Python repositories"),
        ({**SMITH, "image_name": None}, "image_name: is missing"),
        (PRO, "fail_to_pass: is text, but no JSON list"),
        ({**PRO, "fail_to_pass": '["t"]', "dockerhub_tag": None}, "dockerhub_tag: is missing"),
        *(
            ({**R2E, "expected_output_json": text}, "expected_output_json: is text, but no JSON object")
            for text in ("{", '{"a": ' * 100_000, '{"a": %s}' % ("1" * 5000))
        ),
        ({**R2E, "expected_output_json": '{"a": "FAILED"}'}, "expects no test to pass"),
        ({**R2E, "expected_output_json": '{"a": "OK"}'}, "'OK' of 'a' is no status"),
        ({**R2E, "execution_result_content": {"test_file_codes": [1]}}, "test_file_codes: must be a list of strings"),
        ({**R2E, "execution_result_content": {"test_file_codes": ["x"]}}, "must be of one length"),
        ({**R2E, "docker_image": None}, "docker_image: is missing"),
        ({"responses_create_params": {"metadata": {}}}, "instance_dict: is missing"),
        ({"question": "?", "answer": "!"}, "the columns answer, question"),
    ],
)
def test_a_bad_row_is_refused_with_row_and_field(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = jsonl(tmp_path, {**SWE, "instance_id": "good"}, row)
    with pytest.raises(TaskError) as refused:
        load_tasks(path)
    assert str(refused.value).startswith(f"{path}: row 2: ")
    assert reason in str(refused.value)
    assert [task.id for task in load_tasks(path, skip_bad=True)] == ["good"]
    assert [str(error) for error in load_all(path).refused] == [str(refused.value)]


def test_the_same_rows_from_every_container(tmp_path: Path) -> None:
    rows = [{**SWE, "instance_id": f"o__r-{n}"} for n in range(3)]
    table = pa.Table.from_pylist([{**row, "FAIL_TO_PASS": json.loads(str(row["FAIL_TO_PASS"]))} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "rows": rows}))
    saved = tmp_path / "saved" / "test"
    saved.mkdir(parents=True)
    with pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as w:
        w.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as w:
        w.write_table(table)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pq.write_table(table, tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    wanted = load_tasks(jsonl(tmp_path, *rows))
    (tmp_path / "one.json").write_text(json.dumps({**rows[0], "PASS_TO_PASS": None, "FAIL_TO_PASS": ["t.py::a"]}))
    assert [task.id for task in load_tasks(tmp_path / "one.json")] == [wanted[0].id]
    for name in ("hub", "a.parquet", "b.json", "c.json", "saved", "saved/test", "d.arrow"):
        assert load_tasks(tmp_path / name) == wanted, name
    assert load_tasks(f"swe-bench:{tmp_path / 'a.parquet'}") == wanted


@pytest.mark.parametrize("names", [["."], [""], [".."], ["/"], ["a/b"], [3], 3, None, ["none"]])
def test_a_saved_dataset_names_what_lies_beside_it(tmp_path: Path, names: Any) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    with pytest.raises(TaskError, match=re.escape(str(tmp_path))):
        load_tasks(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    files = [{"filename": name} for name in names] if isinstance(names, list) else names
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(TaskError, match=re.escape(str(tmp_path))):
        load_tasks(tmp_path)


@pytest.mark.parametrize("row", [SWE, SMITH, {**PRO, "fail_to_pass": '["t"]'}, R2E, NEMOTRON])
def test_a_converted_row_of_any_form_is_the_same_task(tmp_path: Path, row: dict[str, Any]) -> None:
    tasks = load_tasks(jsonl(tmp_path, row))
    write_rows(tasks, tmp_path / "converted.jsonl")
    assert load_tasks(tmp_path / "converted.jsonl") == tasks


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.json"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 not really")
    with pytest.raises(TaskError, match=rf"{name}: not readable as"):
        load_tasks(tmp_path / name)


def test_a_selection_names_tasks_of_another_source(tmp_path: Path) -> None:
    jsonl(tmp_path, SWE, SMITH | {"instance_id": "other"})
    picked = tmp_path / "picked.jsonl"
    picked.write_text('{"source": "rows.jsonl", "id": "other"}\n{"source": "bundled", "id": "page-count"}\n')
    assert [task.id for task in load_tasks(picked)] == ["other", "page-count"]
    picked.write_text('{"source": "rows.jsonl", "id": "third"}\n')
    with pytest.raises(TaskError, match="row 1: id: there is no usable task 'third'"):
        load_tasks(picked)
    picked.write_text('{"source": "nowhere.jsonl", "id": "third"}\n')
    with pytest.raises(TaskError, match=r"picked.jsonl: row 1: source: .*nowhere.jsonl: no such file"):
        load_tasks(picked)


def test_selections_that_name_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": "b.jsonl", "id": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"source": "a.jsonl", "id": "x"}\n')
    (tmp_path / "c.jsonl").write_text('{"source": "c.jsonl", "id": "x"}\n')
    assert not load_all(tmp_path / "a.jsonl").tasks
    assert "c.jsonl names itself" in str(load_all(tmp_path / "c.jsonl").refused[0])


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"a.py": "one\ntwo\nthree\n"}, {"a.py": "one\n2\nthree\n- x\n"}),
    ({"a.py": "one"}, {"a.py": "two"}),
    ({"a.py": "one\n"}, {"b.py": "-- b\n++ c\n", "a.py": None}),
    ({"a.py": "x\n" * 9 + "y\n" + "x\n" * 9}, {"a.py": "z\n" + "x\n" * 18, "c/d.py": "new"}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_reversed_patch_takes_the_patch_back(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    work = repository(tmp_path / "r", before, after)
    (tmp_path / "back.patch").write_bytes(reversed_patch(git(work, "diff", "HEAD~1", "HEAD").encode()))
    git(work, "apply", "--index", str(tmp_path / "back.patch"))
    assert git(work, "write-tree") == git(work, "rev-parse", "HEAD~1^{tree}")


def test_a_patch_of_contents_applies(tmp_path: Path) -> None:
    work = repository(tmp_path / "r", {"a.py": "one\ntwo", "gone.py": "x\n"})
    parts = [
        patch_of_contents("a.py", "one\ntwo", "one\n2\n"),
        patch_of_contents("new/b.py", None, "b"),
        patch_of_contents("gone.py", "x\n", None),
    ]
    (tmp_path / "x.patch").write_text("".join(parts))
    git(work, "apply", "--index", str(tmp_path / "x.patch"))
    assert ((work / "a.py").read_text(), (work / "new/b.py").read_text()) == ("one\n2\n", "b")
    assert not (work / "gone.py").exists()
    with pytest.raises(PatchTextError, match="middle of a hunk"):
        reversed_patch(b"--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n-x\n")
