"""The bridge to Harbor in an environment of its own, since Harbor needs Python 3.12.

`SANDLOT_TEST_HARBOR_PYTHON` names its interpreter; `tools/harbor-env.sh` makes it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from sandlot.errors import MissingDependencyError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.harbor import HarborBackend

PYTHON = os.environ.get("SANDLOT_TEST_HARBOR_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="SANDLOT_TEST_HARBOR_PYTHON names no interpreter with Harbor")
def test_the_contract_and_whole_trials() -> None:
    contract = ("test_sandbox_exec.py", "test_sandbox_ends.py")
    modules = ("test_harbor_inside.py", *contract)
    ran = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "harbor", *(f"sandbox/{m}" for m in modules)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "HARBOR_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    (passed,) = re.findall(r"^(\d+) passed", ran.stdout, re.MULTILINE)
    assert int(passed) > 35, ran.stdout


@pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="Harbor is installed here")
async def test_without_harbor_its_extra_is_named() -> None:
    backend = HarborBackend()
    with pytest.raises(MissingDependencyError, match=r"sandlot\[harbor\]"):
        await backend.create(SandboxSpec(image="some-image"))
    (check,) = await backend.doctor()
    assert not check.ok
    await backend.close()
