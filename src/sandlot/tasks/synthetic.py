"""R2E-Gym rows: tests made for a commit, and what each of them says with the real fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandlot.tasks.patches import patch_of_contents
from sandlot.tasks.row import Fields, Row
from sandlot.tasks.swe import TESTBED, placed
from sandlot.tasks.task import R2EGrading, Task

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STATUSES = frozenset(("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"))
_IMAGE_TESTS = "/r2e_tests"
_HIDDEN = (
    _IMAGE_TESTS,
    "/root/r2e_tests",
    "/root/run_tests.sh",
    f"{TESTBED}/r2e_tests",
    f"{TESTBED}/run_tests.sh",
    f"{TESTBED}/expected_test_output.json",
)
"""Where R2E-Gym's images keep what belongs to the tests."""


def r2e(path: Path, number: int, row: Fields) -> Task:
    """The task of an R2E-Gym row.

    Its tests are those of `execution_result_content`, or else the image's own. The image is `docker_image`; the
    solution is `patch`, or made of the files that `parsed_commit_content` tells whole.
    """
    where = Row(path, number, row)
    commit, repo = where.text(row, "commit_hash"), where.text(row, "repo_name") or where.text(row, "repo")
    name = where.text(row, "instance_id") or (f"{repo}-{commit[:12]}" if repo and commit else "")
    if not name:
        raise where.error("commit_hash", "no instance_id, and no repo_name with commit_hash, names this task")
    image = where.text(row, "image") or where.text(row, "docker_image")
    if not image and row.get("repository") is None:
        raise where.error("docker_image", "is missing, and no repository is named either")
    files = _tests(where)
    if not files and row.get("repository") is not None:
        raise where.error("execution_result_content", "tells no test file, and there is no image that has them")
    grading = R2EGrading(
        expected=expected(where),
        files=files,
        image_tests="" if files else _IMAGE_TESTS,
        timeout=where.seconds(row, "timeout", R2EGrading.timeout),
    )
    statement = where.needed(row, "problem_statement")
    task = placed(where, name, image, TESTBED, grading, python=f"{TESTBED}/.venv/bin/python")
    gold = task.gold_patch or _gold(where)
    text = statement.strip().removeprefix("[ISSUE]").removesuffix("[/ISSUE]").strip()
    hidden = _HIDDEN if task.repository is None else ()
    return replace(task, statement=text, gold_patch=gold, hidden=hidden)


def expected(where: Row) -> dict[str, str]:
    """What each test says with the real fix, by its name without colours and reasons."""
    field = "expected_output_json"
    found: dict[str, str] = {}
    for name, status in where.object(where.row, field).items():
        plain = _COLOURS.sub("", name).split(" - ")[0].strip()
        if not isinstance(status, str) or status not in _STATUSES:
            raise where.error(field, f"{status!r} of {plain!r} is no status")
        if plain:
            found[plain] = status
    if "PASSED" not in found.values():
        raise where.error(field, "expects no test to pass, so no patch could be told from no patch")
    return found


def _tests(where: Row) -> dict[str, bytes]:
    field = "execution_result_content"
    result = where.object(where.row, field)
    codes, names = (where.strings(result, field, key) for key in ("test_file_codes", "test_file_names"))
    if len(codes) != len(names):
        raise where.error(field, "test_file_codes and test_file_names must be of one length")
    if bad := [name for name in names if "/" in name or not name.endswith(".py")]:
        raise where.error(field, f"{bad[0]!r} is no name of a test file")
    return {f"r2e_tests/{name}": code.encode() for name, code in zip(names, codes, strict=True)}


def _gold(where: Row) -> bytes | None:
    """The commit's change of files that are no tests, where the row tells them whole."""
    parts = []
    changes = where.object(where.row, "parsed_commit_content").get("file_diffs")
    for change in changes if isinstance(changes, list) else []:
        header: Any = change.get("header") if isinstance(change, Mapping) else None
        file = header.get("file") if isinstance(header, Mapping) else None
        path = file.get("path") if isinstance(file, Mapping) else None
        old, new = (change.get(f"{side}_file_content") for side in ("old", "new")) if header else (None, None)
        if not isinstance(path, str) or not isinstance(old, str | None) or not isinstance(new, str | None):
            return None
        if not re.search(r"(^|/)(tests?/|test_[^/]*$|conftest\.py$)|_test\.py$", path):
            parts.append(patch_of_contents(path, old or None, new or None))
    return "".join(parts).encode() or None
