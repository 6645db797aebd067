"""Adapters against the trainers' own code, in an environment of its own: torch, TRL and Tinker are heavy.

`SANDLOT_TEST_TRAINERS_PYTHON` names its interpreter; `tools/trainers-env.sh` makes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("SANDLOT_TEST_TRAINERS_PYTHON", "")
TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SANDLOT_TEST_TRAINERS_PYTHON names no interpreter with the trainers"),
]


def test_trls_trainer_steps_on_our_rows(tmp_path: Path) -> None:
    script = TESTS / "support" / "trl_step.py"
    env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    ran = subprocess.run([PYTHON, script, tmp_path], capture_output=True, text=True, timeout=280, check=False, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("LOG "))[4:])
    steps = [entry for entry in told["log"] if "ratio" in entry]
    assert (told["steps"], len(steps)) == (3, 3)
    for entry in steps:
        assert entry["ratio"] == pytest.approx(1, abs=1e-4)
        assert entry["kl"] == pytest.approx(0, abs=1e-5)
        assert entry["grad_norm"] > 0
        assert entry["sample/staleness_max"] <= 3
    # What groups told since the last log, which may be nothing.
    assert {entry["sandlot/reward"] for entry in told["log"] if "sandlot/reward" in entry} == {0.5}


OWN = [
    "test_atif.py::test_harbors_own_models_take_the_trajectories",
    "test_tinker_prime_openenv.py::test_openenvs_own_trace_takes_them",
    "test_tinker_prime_openenv.py::test_tinkers_own_types_take_the_datums",
    "test_tinker_prime_openenv.py::test_verifiers_own_trace_takes_them",
    "test_verl_skyrl_areal.py::test_areal_tensors_pad_versions_with_minus_one",
    "test_verl_skyrl_areal.py::test_areals_own_check_and_padding_take_the_tensors",
    "test_verl_skyrl_areal.py::test_skyrls_own_validator_agrees",
    "test_verl_skyrl_areal.py::test_verls_own_loss_weighs_as_the_reference_does",
    "test_verl_skyrl_areal.py::test_verls_own_type_takes_the_outputs",
    "test_slime_rows.py::test_what_is_written_can_be_read",
    "test_files.py::test_datasets_reads_the_parquet_file",
]


def test_rows_in_the_trainers_own_types() -> None:
    """One run for all: an interpreter that imports torch takes seconds to start."""
    ran = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *(f"trainers/{name}" for name in OWN)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert not re.search(r"\d skipped", ran.stdout), ran.stdout
