"""Real agents in containers without a network: a bundled task solved by the scripted engine, every token audited."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandlot.config import load_config
from sandlot.rollout.progress import Silent
from sandlot.rollout.run import rollout
from sandlot.sandbox.docker import netns
from support.backends import podman_host

pytestmark = [pytest.mark.npm, pytest.mark.slow, pytest.mark.timeout(600)]

SANDLOT = [sys.executable, "-m", "sandlot.cli"]


async def _rollout(out: Path, harness: list[str]) -> None:
    flags: dict[str, Any] = {"tasks": "bundled", "only": ["page-count"], "harness": harness, "engine": "scripted"}
    config = load_config(None, {**flags, "sandbox": "docker"})
    results = await rollout(config, out, progress=Silent(), say=lambda text: None)
    assert {r.episode_id: (r.reward, r.failure) for r in results} == {
        f"page-count--{name}--0": (1.0, None) for name in harness
    }, [r.detail for r in results]
    audit = [*SANDLOT, "audit", str(out), "--json"]
    done = await asyncio.to_thread(subprocess.run, audit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    counts = json.loads(done.stdout)
    assert counts["samples"] == len(harness)
    assert counts["trained_tokens"] == counts["sampled_tokens"] > 0


async def test_claude_code_and_pi_solve_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", await asyncio.to_thread(podman_host))
    await _rollout(tmp_path / "run", ["claude-code", "pi"])


async def test_claude_code_solves_one_where_only_a_relay_leads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", await asyncio.to_thread(podman_host))
    monkeypatch.setattr(netns, "exists", lambda pid: False)  # as with a daemon elsewhere
    await _rollout(tmp_path / "run", ["claude-code"])
