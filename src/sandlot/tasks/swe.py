"""Rows of the SWE-bench family: SWE-bench (all sets), Live, SWE-Gym, SWE-rebench, SWE-smith and SWE-bench Pro.

Beside its form's columns a row may have `image`, `workdir`, `repository` (beside the file; the image is then `host`),
`setup`, `protected`, `limits`, `options` and `timeout`, which win over what the form would say.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandlot.tasks.patches import PatchTextError, reversed_patch
from sandlot.tasks.row import Fields, Row
from sandlot.tasks.task import Grading, Mutation, PytestGrading, SwebenchGrading, SweProGrading, Task

TESTBED = "/testbed"
TESTBED_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"
SWE_GYM_REPOS = frozenset(
    (
        "getmoto/moto", "python/mypy", "pandas-dev/pandas", "dask/dask", "Project-MONAI/MONAI", "pydantic/pydantic",
        "conan-io/conan", "iterative/dvc", "bokeh/bokeh", "modin-project/modin", "facebookresearch/hydra",
    )
)  # fmt: skip
_FACTS = ("repo", "version", "environment_setup_commit", "created_at", "difficulty", "language", "repo_language")
_IMAGES = {
    "swe-bench": ("swebench/sweb.eval.x86_64.{id}:latest", "_1776_"),
    "swe-bench-live": ("starryzhang/sweb.eval.x86_64.{id}:latest", "_1776_"),
    "swe-gym": ("xingyaoww/sweb.eval.x86_64.{id}:latest", "_s_"),
    "swe-rebench": ("swerebench/sweb.eval.x86_64.{id}:latest", "_1776_"),
}
"""The image of a row that names none: `{id}` is its lower-case id with `__` written as told."""


def swebench(path: Path, number: int, row: Fields) -> Task:
    """SWE-bench Verified, Lite, Multilingual and full."""
    return _swe(Row(path, number, row), "swe-bench", TESTBED_PYTHON)


def live(path: Path, number: int, row: Fields) -> Task:
    """SWE-bench-Live: its images run tests with the `python` on their PATH."""
    return _swe(Row(path, number, row), "swe-bench-live", "")


def gym(path: Path, number: int, row: Fields) -> Task:
    """SWE-Gym."""
    return _swe(Row(path, number, row), "swe-gym", TESTBED_PYTHON)


def rebench(path: Path, number: int, row: Fields) -> Task:
    """SWE-rebench."""
    return _swe(Row(path, number, row), "swe-rebench", TESTBED_PYTHON)


def _swe(row: Row, form: str, python: str) -> Task:
    fields = row.row
    name = row.needed(fields, "instance_id")
    pattern, separator = _IMAGES[form]
    image = (
        row.text(fields, "image")
        or row.text(fields, "docker_image")
        or row.text(fields, "image_name")
        or pattern.format(id=name.lower().replace("__", separator))
    )
    fail_to_pass, pass_to_pass = required(row)
    parser, script = row.text(fields, "log_parser"), row.text(fields, "eval_script")
    official = bool(parser and script) and form == "swe-bench"
    if not official and (odd := [test for test in (*fail_to_pass, *pass_to_pass) if not is_pytest_name(test)]):
        raise row.error(
            "FAIL_TO_PASS" if odd[0] in fail_to_pass else "PASS_TO_PASS",
            f"{odd[0]!r} is no pytest name, and the row has no eval_script and log_parser for the swebench package",
        )
    if official and row.text(fields, "eval_type") == "fail_only":
        raise row.error("eval_type", "fail_only counts tests that did not run as passed, which is no proof")
    grading = SwebenchGrading(
        test_patch=row.needed(fields, "test_patch").encode(),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        command=test_commands(script) if official else "",
        log_parser=parser if official else "",
        timeout=row.seconds(fields, "timeout", SwebenchGrading.timeout),
    )
    return placed(row, name, image, TESTBED, grading, python=python)


def placed(row: Row, name: str, image: str, workdir: str, grading: Grading, *, python: str = "") -> Task:
    """The task of a row, with what its own columns say of place, set-up, limits and solution."""
    fields = row.row
    base = row.text(fields, "base_commit")
    repository = row.repository(fields, base=base)
    if repository is not None:
        image, python = row.text(fields, "image") or "host", ""
        workdir = f"/workspace/{re.sub(r'[^A-Za-z0-9._-]', '_', name)}"
    elif image == "host":
        raise row.error("repository", "the image 'host' holds no repository, so one must be named here")
    metadata: dict[str, Any] = {key: fields[key] for key in _FACTS if isinstance(fields.get(key), str)}
    if base and repository is None:
        metadata["base_commit"] = base
    gold = row.text(fields, "patch")
    return Task(
        id=name,
        statement=row.needed(fields, "problem_statement"),
        grading=grading,
        image=image,
        repository=repository,
        workdir=row.workdir(row.text(fields, "workdir") or workdir),
        setup=row.strings(fields, "", "setup"),
        protected=row.strings(fields, "", "protected"),
        limits=row.limits(fields),
        gold_patch=gold.encode() if gold.strip() else None,
        python=row.text(fields, "python") or python,
        options=row.options(fields),
        metadata=metadata,
    )


def required(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests that must begin to pass and those that must go on; a row without the first cannot be graded."""
    fail_to_pass = row.tests(row.row, "", "FAIL_TO_PASS", "fail_to_pass")
    if not fail_to_pass:
        raise row.error("FAIL_TO_PASS", "names no test, so no patch could be told from no patch")
    return fail_to_pass, row.tests(row.row, "", "PASS_TO_PASS", "pass_to_pass")


def is_pytest_name(name: str) -> bool:
    """Whether a test's name is one that pytest gives: `path.py::…`."""
    return bool(re.match(r"[^:\s][^:]*\.py::\S", name))


_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(?P<end>\w+)['\"]?\s*$")


def test_commands(eval_script: str) -> str:
    """The lines of an evaluation script that run the tests; those that move the repository or patch it are the
    grader's own work. Nothing is installed from outside: there is no network."""
    kept, until = ["export PIP_NO_INDEX=1"], ""
    for line in eval_script.splitlines():
        if until:
            until = "" if line.strip() == until else until
            continue
        if ">>>>> End Test Output" in line:
            break
        words = line.split()
        if words[:1] == ["git"]:
            match = _HERE_DOCUMENT.search(line)
            until = match["end"] if match else ""
        elif words and not line.startswith("#!") and ">>>>>" not in line:
            kept.append(line)
    return "\n".join(kept)


test_commands.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name


def smith(path: Path, number: int, row: Fields) -> Task:
    """SWE-smith: `patch` makes the bug, so its reverse is the solution; the files of the tests that must begin to pass
    are not in the agent's repository."""
    where = Row(path, number, row)
    name = where.needed(row, "instance_id")
    fail_to_pass, pass_to_pass = required(where)
    if odd := [test for test in (*fail_to_pass, *pass_to_pass) if not is_pytest_name(test)]:
        raise where.error("FAIL_TO_PASS", f"{odd[0]!r} is no pytest name; only rows of Python repositories are graded")
    bug = where.needed(row, "patch").encode()
    files = tuple(dict.fromkeys(test.partition("::")[0] for test in fail_to_pass))
    grading = PytestGrading(
        files={},
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        timeout=where.seconds(row, "timeout", 1800.0),
        base_files=files,
    )
    image = where.text(row, "image") or where.text(row, "image_name")
    if not image and row.get("repository") is None:
        raise where.error("image_name", "is missing, and no repository is named either")
    task = placed(where, name, image, TESTBED, grading, python=TESTBED_PYTHON)
    try:
        return replace(task, gold_patch=reversed_patch(bug), mutation=Mutation(bug, files))
    except PatchTextError as error:
        raise where.error("patch", str(error)) from None


def pro(path: Path, number: int, row: Fields) -> Task:
    """SWE-bench Pro: run script and parser are columns, or lie in `run_scripts/<instance_id>/` beside the file."""
    where = Row(path, number, row)
    name = where.needed(row, "instance_id")
    tag = where.text(row, "dockerhub_tag")
    image = where.text(row, "image") or (f"jefzda/sweap-images:{tag}" if tag else "")
    if not image and row.get("repository") is None:
        raise where.error("dockerhub_tag", "is missing, and no image or repository is named either")
    fail_to_pass, pass_to_pass = required(where)
    grading = SweProGrading(
        run_script=_beside(where, "run_script", name, "run_script.sh"),
        parser_script=_beside(where, "parser_script", name, "parser.py"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        selected_test_files=where.strings(row, "", "selected_test_files_to_run"),
        before_repo_set_cmd=where.text(row, "before_repo_set_cmd").replace("\\n", "\n"),
        files=where.files(row, "files"),
        timeout=where.seconds(row, "timeout", SweProGrading.timeout),
    )
    task = placed(where, name, image, "/app", grading)
    parts = [task.statement]
    for key, title in (("requirements", "Requirements"), ("interface", "New interfaces")):
        if text := where.text(row, key).strip():
            parts.append(f"{title}:\n{text}")
    return replace(task, statement="\n\n".join(parts))


def _beside(row: Row, key: str, name: str, file: str) -> str:
    if text := row.text(row.row, key):
        return text
    if "/" in name or name.startswith("."):
        raise row.error("instance_id", f"{name!r} cannot be the name of a directory")
    return row.beside(f"run_scripts/{name}/{file}", key)
