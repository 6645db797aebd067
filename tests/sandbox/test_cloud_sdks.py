"""The clouds' own SDKs, in an environment of theirs: they speak to servers of ours.

`SANDLOT_TEST_CLOUDS_PYTHON` names its interpreter; `tools/clouds-env.sh` makes it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("SANDLOT_TEST_CLOUDS_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="SANDLOT_TEST_CLOUDS_PYTHON names no interpreter with the clouds' SDKs"),
]


CONTRACT = ("test_sandbox_exec.py", "test_sandbox_ends.py", "test_sandbox_snapshot.py", "test_sandbox_files.py")
INSIDE = ("test_e2b_inside.py", "test_modal_inside.py", "test_daytona_inside.py", "test_kubernetes_inside.py")


@pytest.mark.parametrize(
    ("modules", "only", "least"),
    [
        (("test_clouds.py",), "", 36),
        (INSIDE, "", 20),
        *((CONTRACT, name, 45) for name in ("e2b-sdk", "modal", "daytona", "kubernetes")),
    ],
)
def test_the_adapters_with_the_sdks(modules: tuple[str, ...], only: str, least: int) -> None:
    ran = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only, *(f"sandbox/{name}" for name in modules)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    (passed,) = re.findall(r"^(\d+) passed", ran.stdout, re.MULTILINE)
    assert int(passed) >= least, ran.stdout
