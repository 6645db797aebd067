"""Every agent of the catalogue in the embedded sandbox, as a run: a bundled task solved and every token audited."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.toy_model import make_toy_model

pytestmark = [pytest.mark.npm, pytest.mark.slow]

AGENTS = ("codex", "opencode", "qwen-code", "gemini-cli", "mini-swe-agent")
SANDLOT = [sys.executable, "-m", "sandlot.cli"]


@pytest.mark.timeout(600)
def test_scripted_solutions_solve_a_task_with_each(tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "toy", max_context=262_144)
    run = tmp_path / "run"
    command = [*SANDLOT, "rollout", "bundled", "--only", "page-count", "-j", "2", "--engine", "scripted"]
    command += ["--model", str(model), "--out", str(run), "--json"]
    for name in AGENTS:
        command += ["--harness", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr
    ends = {e["episode_id"]: (e["reward"], e["failure"]) for e in json.loads(done.stdout)["episodes"]}
    assert ends == {f"page-count--{name}--0": (1.0, None) for name in AGENTS}
    audited = subprocess.run([*SANDLOT, "audit", str(run), "--json"], capture_output=True, text=True, check=False)
    assert audited.returncode == 0, audited.stdout
    counts = json.loads(audited.stdout)
    assert counts["violations"] == []
    assert counts["forks"] == 0
    assert counts["samples"] == len(AGENTS)
    assert counts["trained_tokens"] == counts["sampled_tokens"] > 0
