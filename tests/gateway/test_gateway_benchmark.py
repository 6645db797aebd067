"""The benchmark runs, and its floor and the gateway make the same samples of the same session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_floor_and_the_gateway_serve_the_same_session(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    argv = [sys.executable, str(ROOT / "benchmarks" / "gateway.py"), "session", "--turns", "14", "--repeat", "1"]
    subprocess.run([*argv, "--json", str(out)], check=True, timeout=240)
    measured = json.loads(out.read_text())["session"]
    ours, floor = measured["sandlot"], measured["floor"]
    assert ours["samples"] == floor["samples"] == 1
    assert ours["tokens"] == floor["tokens"] - 1 > 14 * 700  # the floor ends with the line break after the last turn
    assert ours["trained"] == floor["trained"] > 14 * 100
