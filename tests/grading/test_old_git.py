"""Tests that call git find a workdir that is root's, with a git of any age."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.grading import grade
from sandlot.sandbox import Layer, SandboxBackend, SandboxSpec
from sandlot.tasks import PytestGrading
from support.cheats import calc_task

pytestmark = pytest.mark.asyncio(loop_scope="module")

OLD_GIT = """\
#!/bin/sh
# What git before 2.38 does with it: nothing.
unset GIT_CONFIG_COUNT
[ "$1" != version ] || { echo "git version 2.30.2"; exit; }
exec /usr/bin/git "$@"
"""
TEST = b"""\
import subprocess

def test_git_works():
    assert subprocess.run(["git", "status"], check=True, stdout=subprocess.PIPE).stdout

def test_only_root_decides_that():
    assert subprocess.run(["git", "config", "--system", "core.pager", "touch x"]).returncode != 0
"""


NAMES = ("test_git.py::test_git_works", "test_git.py::test_only_root_decides_that")


@pytest.mark.parametrize("age", ["old", "new"])
async def test_git_works_in_the_workdir(backend: SandboxBackend, tmp_path: Path, age: str) -> None:
    shim = tmp_path / "bin" / "git"
    shim.parent.mkdir()
    if age == "old":
        shim.write_text(OLD_GIT)
        shim.chmod(0o755)
    grading = PytestGrading({"test_git.py": TEST}, NAMES, timeout=60.0)
    spec = SandboxSpec(layers=(Layer(shim.parent, "/usr/local/bin"),))
    verdict = await grade(calc_task(grading), b"", backend, spec=spec)
    assert verdict.reward == 1.0, (verdict.detail, verdict.evidence)
