"""How results become a reward, set for a run or a command: by file, variable or flag; and graded again the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sandlot.cli.app import app
from sandlot.config import GradingConfig, RunConfig, load_config
from sandlot.errors import ConfigError
from sandlot.tasks import GradingOptions
from sandlot.tasks.checked import checked_options
from sandlot.tasks.convert import write_rows
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir
from support.cheats import GOLD, calc_patch, calc_task, in_add

HALF = calc_patch(in_add("return 5 if (a, b) == (2, 3) else a - b")).diff
TOML = """\
[grading]
credit = "fraction"
reruns = 2
timeout = 30
countercheck = false

[grading.weights]
speed = 3
size = 1.5
"""


def sandlot(*args: str, code: int = 0) -> Any:
    """What a command prints as JSON, or its error."""
    done = CliRunner().invoke(app, list(args))
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout) if done.stdout.startswith("[") else done.exception


def test_a_file_variables_and_flags_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    flags = {"credit": "fraction", "reruns": 2, "timeout": 30.0, "countercheck": False}
    weights = {"speed": 3.0, "size": 1.5}
    by_file = load_config(file).grading
    by_flags = load_config(None, {"grading": {**flags, "weights": weights}}).grading
    for name, value in flags.items():
        monkeypatch.setenv(f"SANDLOT_GRADING__{name.upper()}", str(value))
    monkeypatch.setenv("SANDLOT_GRADING__WEIGHTS", json.dumps(weights))
    assert by_file == by_flags == load_config().grading == GradingConfig(**flags, weights=weights)  # type: ignore[arg-type]
    assert by_file.over(GradingOptions()) == GradingOptions("fraction", 2, weights, 30.0, False)
    written = load_config(file).model_dump(mode="json")["grading"]
    assert GradingConfig.model_validate(written) == by_file


def test_what_is_not_said_is_the_tasks_own() -> None:
    own = GradingOptions("fraction", 3, {"a": 1.0}, 5.0, False)
    assert GradingConfig().over(own) == own
    assert GradingConfig(reruns=0).over(own) == GradingOptions("fraction", 0, {"a": 1.0}, 5.0, False)
    assert checked_options(asdict(own)) == own


@pytest.mark.parametrize(
    ("key", "value"),
    [("credit", "half"), ("reruns", -1), ("reruns", 11), ("timeout", 0), ("timeout", "inf"), ("weights", {"a": -1}),
     ("weights", {"a": 0}), ("weights", {"a": "x"}), ("countercheck", "maybe"), ("rerun", 1)],
)  # fmt: skip
def test_what_is_no_setting_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"grading\.{key}"):
        load_config(None, {"grading": {key: value}})
    with pytest.raises(ValueError, match=key):
        checked_options({key: value})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    write_rows([calc_task()], tmp_path / "rows.jsonl")
    return tmp_path / "rows.jsonl"


def test_a_patch_is_graded_as_the_flags_say(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "half.patch").write_bytes(HALF)
    grade = ["grade", str(rows), "--patch", str(tmp_path / "half.patch"), "--json"]
    assert sandlot(*grade)[0]["reward"] == 0.0
    (told,) = sandlot(*grade, "--credit", "fraction", "--no-countercheck", "--test-timeout", "50")
    assert (told["reward"], told["before"], told["failure"]) == (0.25, None, None)
    assert told["evidence"]["options"] == asdict(GradingOptions("fraction", timeout=50.0, countercheck=False))
    assert "countercheck" not in told["evidence"]


def test_a_check_is_done_as_the_file_says(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[grading]\ntimeout = 0.001\n")
    check = ["tasks", "check", str(rows), "--no-cheats", "--json"]
    (told,) = sandlot(*check, "--config", str(tmp_path / "x.toml"), code=1)
    assert "did not end within 0.001 s" in told["faults"][0] or "did not start" in told["faults"][0]
    assert sandlot(*check)[0]["ok"] is True


def run_of(path: Path, rows: Path, episodes: dict[str, tuple[bytes, float | None]], **grading: object) -> RunDir:
    """A run directory as a rollout leaves it."""
    config = RunConfig(tasks=str(rows), grading=GradingConfig(**grading))  # type: ignore[arg-type]
    with RunDir.create_or_continue(path, config.model_dump(mode="json"), facts={}) as run:
        for name, (patch, reward) in episodes.items():
            with run.begin(SessionRecord(episode_id=name, group_id="calc", metadata={"task": "calc"})) as journal:
                journal.append(SealedRecord(reward=reward))
            run.patch_path(name).write_bytes(patch)
            run.complete(name)
    return run


@pytest.mark.slow
def test_a_run_is_graded_again_as_it_was_and_twice_the_same(rows: Path, tmp_path: Path) -> None:
    episodes = {"a": (GOLD, 1.0), "b": (HALF, 0.25), "c": (b"", 0.0)}
    run_of(tmp_path / "run", rows, episodes, credit="fraction")
    first, second = [sandlot("grade", str(tmp_path / "run"), "--json") for _ in range(2)]
    assert [(row["name"], row["before"], row["reward"]) for row in first] == [
        ("a", 1.0, 1.0), ("b", 0.25, 0.25), ("c", 0.0, 0.0)
    ]  # fmt: skip
    judged = ("reward", "failure", "detail", "tests")
    assert [[row[key] for key in judged] for row in first] == [[row[key] for key in judged] for row in second]
    for row, (patch, _) in zip(first, episodes.values(), strict=True):
        evidence = row["evidence"]
        assert evidence["patch"] == patch.decode()
        assert evidence["applied"]["ok"]
        assert evidence["base_commit"]
        ran = evidence["runs"][0]
        assert ran["order"]["files"]
        assert ran["log"]
        assert ran["exit_code"] == 1
        assert set(row["tests"]) == set(calc_task().grading.fail_to_pass + calc_task().grading.pass_to_pass)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_verdict_that_changed_is_told(rows: Path, tmp_path: Path) -> None:
    run_of(tmp_path / "run", rows, {"a": (HALF, 0.25)}, credit="fraction")
    done = CliRunner().invoke(app, ["grade", str(tmp_path / "run"), "--credit", "all", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)[0]["reward"] == 0.0


def test_settings_of_a_run_cannot_come_from_a_file(rows: Path, tmp_path: Path) -> None:
    run_of(tmp_path / "run", rows, {"a": (b"", 0.0)})
    error = sandlot("grade", str(tmp_path / "run"), "--config", str(rows), code=1)
    assert isinstance(error, ConfigError)
    assert "--config goes with --patch" in str(error)
