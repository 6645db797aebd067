"""The whole loop on a real vLLM: real agent, real sandbox, real sampling, audited and scored again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from support import engines
from support.toy_model import make_toy_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.npm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(engines.VLLM_PYTHON is None, reason="SANDLOT_TEST_VLLM_PYTHON names no interpreter with vLLM"),
]


async def sandlot(*args: str) -> dict[str, object]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sandlot.cli", *args, "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, (out + err).decode()
    told: dict[str, object] = json.loads(out)
    return told


async def test_two_turns_on_a_real_vllm_are_one_sample_that_it_scores_alike(tmp_path: Path) -> None:
    """The model writes noise. Cut at eight tokens, Claude Code asks it to go on."""
    model = make_toy_model(tmp_path / "toy", max_context=16_384)
    run = str(tmp_path / "run")
    async with engines.vllm(model, tmp_path, max_context=16_384, logprobs_mode="processed_logprobs") as url:
        served = ["--engine", url, "--model", str(model), "--served-model", "toy"]
        bounds = ["--max-turns", "2", "--max-tokens", "8", "-n", "3", "--out", run]
        told = await sandlot("rollout", "bundled", "--only", "page-count", "--harness", "claude-code", *served, *bounds)
        audited = await sandlot("audit", run, "--rescore", url)
    episodes = told["episodes"]
    assert isinstance(episodes, list)
    assert [e["reward"] for e in episodes] == [0.0] * 3
    assert audited["violations"] == []
    turns, samples = audited["turns"], audited["samples"]
    assert isinstance(turns, int)
    assert isinstance(samples, int)
    assert turns > samples, "no episode came to its second turn"
    gap = audited["rescore"]
    assert isinstance(gap, dict)
    assert gap["tokens"] == audited["trained_tokens"] > 0
    assert gap["skipped"] == 0
    assert gap["largest"] < 1e-3
