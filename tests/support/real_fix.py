"""One real fix (of the package `parse`), and the rows that tell it in each form."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandlot.tasks.patches import reversed_patch
from support.repositories import git

DATA = Path(__file__).parents[1] / "data" / "swebench"
TEST = "tests/test_parse.py"
PARSER = """\
import json, re, sys
out = open(sys.argv[1], encoding="utf-8", errors="replace").read()
found = re.findall(r"^(PASSED|FAILED|ERROR) (\\S.*?)(?: - .*)?$", out, re.M)
json.dump({"tests": [{"name": name, "status": status} for status, name in found]}, open(sys.argv[3], "w"))
"""


@dataclass(frozen=True)
class Fix:
    """The row of the fix, and a repository at `work` with its base commit and the commit that has fix and tests."""

    row: dict[str, Any]
    work: Path
    base: str
    future: str

    @property
    def common(self) -> dict[str, Any]:
        return {key: self.row[key] for key in ("repo", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")}


def real_fix(work: Path) -> Fix:
    """Make the repository at `work`, with the future checked out."""
    lines = (json.loads(line) for line in (DATA / "rows.jsonl").read_text().splitlines())
    row = next(line for line in lines if line["instance_id"] == "parse__parse-1.20.2")
    work.mkdir()
    git(work, "init", "-q", "-b", "main", ".")
    with (DATA / row["repository"]["fast_export"]).open("rb") as source:
        subprocess.run(["git", "fast-import", "--quiet"], cwd=work, stdin=source, check=True)
    git(work, "reset", "-q", "--hard", "main")
    base = git(work, "rev-parse", "HEAD").strip()
    for name in ("patch", "test_patch"):
        (work.parent / "x.patch").write_text(row[name])
        git(work, "apply", "--index", str(work.parent / "x.patch"))
    git(work, "commit", "-qm", "The fix and its tests")
    return Fix(row, work, base, git(work, "rev-parse", "HEAD").strip())


def swe(fix: Fix) -> dict[str, Any]:
    return {
        **fix.common,
        "instance_id": "swe",
        "base_commit": fix.base,
        "patch": fix.row["patch"],
        "test_patch": fix.row["test_patch"],
    }


def pro(fix: Fix) -> dict[str, Any]:
    return {
        **fix.common,
        "instance_id": "pro",
        "base_commit": fix.base,
        "requirements": "Names keep their hyphens in the result.",
        "patch": fix.row["patch"],
        "FAIL_TO_PASS": None,
        "PASS_TO_PASS": None,
        "fail_to_pass": str(json.loads(fix.row["FAIL_TO_PASS"])),
        "pass_to_pass": str(json.loads(fix.row["PASS_TO_PASS"])),
        "selected_test_files_to_run": str([TEST]),
        "before_repo_set_cmd": f"git reset --hard {fix.base}\ngit clean -fd\ngit checkout {fix.future} -- {TEST}",
        "run_script": "IFS=,; python3 -m pytest -rA --tb=short -p no:cacheprovider $1\n",
        "parser_script": PARSER,
    }


def r2e(fix: Fix) -> dict[str, Any]:
    names = [*json.loads(fix.row["FAIL_TO_PASS"]), *json.loads(fix.row["PASS_TO_PASS"])]
    expected = {".".join(name.split("::")[1:]): "PASSED" for name in names}
    change = {
        "header": {"file": {"path": "parse.py"}},
        "old_file_content": git(fix.work, "show", f"{fix.base}:parse.py"),
        "new_file_content": git(fix.work, "show", f"{fix.future}:parse.py"),
    }
    tests = {"test_file_codes": [git(fix.work, "show", f"{fix.future}:{TEST}")], "test_file_names": ["test_1.py"]}
    return {
        "repo_name": "parse",
        "commit_hash": fix.future,
        "problem_statement": f"[ISSUE]\n{fix.row['problem_statement']}\n[/ISSUE]",
        "expected_output_json": json.dumps({**expected, "test_that_always_failed": "FAILED"}),
        "execution_result_content": json.dumps(tests),
        "parsed_commit_content": json.dumps({"file_diffs": [change]}),
    }


def smith(fix: Fix) -> dict[str, Any]:
    return {**fix.common, "instance_id": "smith", "patch": reversed_patch(fix.row["patch"].encode()).decode()}
