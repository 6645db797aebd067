"""One real fix told in the other forms: SWE-bench Pro, R2E-Gym and SWE-smith rows of it hold under `tasks check`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandlot.grading.check import check_task
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import load_tasks
from sandlot.tasks.patches import reversed_patch
from support.repositories import git, stream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
DATA = Path(__file__).parents[1] / "data" / "swebench"
TEST = "tests/test_parse.py"
PARSER = """\
import json, re, sys
out = open(sys.argv[1], encoding="utf-8", errors="replace").read()
found = re.findall(r"^(PASSED|FAILED|ERROR) (\\S.*?)(?: - .*)?$", out, re.M)
json.dump({"tests": [{"name": name, "status": status} for status, name in found]}, open(sys.argv[3], "w"))
"""


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[dict[str, Any], Path, str, str]:
    """The row of `parse`, and its repository with base commit and the commit that has fix and tests."""
    lines = (json.loads(line) for line in (DATA / "rows.jsonl").read_text().splitlines())
    row = next(line for line in lines if line["instance_id"] == "parse__parse-1.20.2")
    work = tmp_path / "work"
    work.mkdir()
    git(work, "init", "-q", "-b", "main", ".")
    with (DATA / row["repository"]["fast_export"]).open("rb") as source:
        subprocess.run(["git", "fast-import", "--quiet"], cwd=work, stdin=source, check=True)
    git(work, "reset", "-q", "--hard", "main")
    base = git(work, "rev-parse", "HEAD").strip()
    for name in ("patch", "test_patch"):
        (tmp_path / "x.patch").write_text(row[name])
        git(work, "apply", "--index", str(tmp_path / "x.patch"))
    git(work, "commit", "-qm", "The fix and its tests")
    future = git(work, "rev-parse", "HEAD").strip()
    stream(work, tmp_path / "repo.fi", "main")
    return row, work, base, future


def pro(row: dict[str, Any], work: Path, base: str, future: str) -> dict[str, Any]:
    return {
        "instance_id": "pro",
        "repo": row["repo"],
        "base_commit": base,
        "problem_statement": row["problem_statement"],
        "requirements": "Names keep their hyphens in the result.",
        "patch": row["patch"],
        "fail_to_pass": str(json.loads(row["FAIL_TO_PASS"])),
        "pass_to_pass": str(json.loads(row["PASS_TO_PASS"])),
        "selected_test_files_to_run": str([TEST]),
        "before_repo_set_cmd": f"git reset --hard {base}\ngit clean -fd\ngit checkout {future} -- {TEST}",
        "run_script": 'IFS=,; python3 -m pytest -rA --tb=short -p no:cacheprovider $1\n',
        "parser_script": PARSER,
        "repository": {"fast_export": "repo.fi", "base": base},
    }  # fmt: skip


def r2e(row: dict[str, Any], work: Path, base: str, future: str) -> dict[str, Any]:
    names = [*json.loads(row["FAIL_TO_PASS"]), *json.loads(row["PASS_TO_PASS"])]
    expected = {".".join(name.split("::")[1:]): "PASSED" for name in names}
    return {
        "repo_name": "parse",
        "commit_hash": future,
        "problem_statement": f"[ISSUE]\n{row['problem_statement']}\n[/ISSUE]",
        "expected_output_json": json.dumps({**expected, "test_that_always_failed": "FAILED"}),
        "execution_result_content": json.dumps(
            {"test_file_codes": [(work / TEST).read_text()], "test_file_names": ["test_1.py"]}
        ),
        "parsed_commit_content": json.dumps(
            {
                "file_diffs": [
                    {
                        "header": {"file": {"path": "parse.py"}},
                        "old_file_content": git(work, "show", f"{base}:parse.py"),
                        "new_file_content": git(work, "show", f"{future}:parse.py"),
                    }
                ]
            }
        ),
        "repository": {"fast_export": "repo.fi", "base": base},
    }


def smith(row: dict[str, Any], work: Path, base: str, future: str) -> dict[str, Any]:
    return {
        "instance_id": "smith",
        "repo": row["repo"],
        "patch": reversed_patch(row["patch"].encode()).decode(),
        "problem_statement": row["problem_statement"],
        "FAIL_TO_PASS": row["FAIL_TO_PASS"],
        "PASS_TO_PASS": row["PASS_TO_PASS"],
        "repository": {"fast_export": "repo.fi", "base": future},
    }


@pytest.mark.parametrize("form", [pro, r2e, smith])
async def test_the_form_holds(
    backend: SandboxBackend, tmp_path: Path, upstream: tuple[dict[str, Any], Path, str, str], form: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(form(*upstream)) + "\n")
    (task,) = load_tasks(tmp_path / "rows.jsonl")
    checked = await check_task(task, backend, cheats=False)
    assert checked.faults == ()
    assert (checked.gold, checked.empty) == (1.0, 0.0)
