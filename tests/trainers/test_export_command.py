"""`sandlot export` into every form, from a run on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sandlot.cli.app import app
from sandlot.errors import ConfigError, SandlotError
from sandlot.trainers import TRAINERS
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir
from support.sessions import SessionBuilder


def session(forks: int) -> SessionBuilder:
    builder = SessionBuilder()
    first = builder.root((1, 2, 3), (4, 5), versions=(("0", 0, 2),))
    builder.follow(first, (6,), (7, 8, 9), versions=(("0", 0, 3),))
    for k in range(forks):
        builder.fork(first, 3, (20 + k,), (30,), versions=(("1", 0, 1),), branch="side")
    return builder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """One group: an episode of three rows that solved, one that did not, one ungraded, one that broke."""
    path = tmp_path / "run"
    config = {"sampling": {"temperature": 0.8, "top_p": 1.0}}
    ends: list[tuple[str, int, SealedRecord]] = [
        ("a", 2, SealedRecord(reward=1.0)),
        ("b", 0, SealedRecord(reward=0.0)),
        ("c", 0, SealedRecord(reward=None, failure="grader_error")),
        ("d", 0, SealedRecord(reward=None, failure="infra_error")),
    ]
    with RunDir.create_or_continue(path, config) as run:
        for name, forks, sealed in ends:
            with run.begin(SessionRecord(episode_id=name, group_id="g", metadata={"task": "t"})) as journal:
                for turn in session(forks).turns:
                    journal.turn(turn)
                journal.append(sealed)
            run.complete(name)
    return path


def export(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["export", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.mark.parametrize("form", TRAINERS.names())
def test_every_form_is_written(form: str, run_dir: Path) -> None:
    told = export(str(run_dir), "--to", form)
    assert Path(told["file"]).stat().st_size > 0
    assert told["rows"] > 0
    if form not in ("parquet", "jsonl"):
        assert told["samples"] <= 4  # neither the ungraded nor the broken one


def test_credit_counts_episodes_and_says_what_is_left_out(run_dir: Path) -> None:
    told = export(str(run_dir), "--to", "tinker", "--advantage", "grpo_nostd")
    assert told["left_out"] == {"c": "grader_error", "d": "infra_error"}
    rows = [json.loads(line) for line in Path(told["file"]).read_text().splitlines()]
    totals: dict[int, float] = {}
    for row in rows:
        key = row["metadata"]["traj_idx"]
        totals[key] = totals.get(key, 0.0) + sum(row["loss_fn_inputs"]["advantages"])
    assert totals == {0: pytest.approx(0.5), 1: pytest.approx(-0.5)}
    for form in ("tinker", "verl", "slime"):
        assert export(str(run_dir), "--to", form, "--branches", "main_only")["samples"] == 2
        assert export(str(run_dir), "--to", form)["left_out"] == {"c": "grader_error", "d": "infra_error"}
    cut = export(str(run_dir), "--to", "slime", "--max-tokens", "5")
    assert (cut["samples"], cut["trained_tokens"]) == (4, 6)


def test_an_answer_that_was_asked_for_again_is_trained_only_by_choice(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir.create_or_continue(path, {}) as run, run.begin(SessionRecord(episode_id="a", group_id="g")) as journal:
        builder = SessionBuilder()
        builder.root((1, 2, 3), (9, 9), versions=(("0", 0, 2),))
        again = builder.root((1, 2, 3), (4, 5), versions=(("0", 0, 2),))
        builder.follow(again, (6,), (7,), versions=(("0", 0, 1),))
        for turn in builder.turns:
            journal.turn(turn)
        journal.append(SealedRecord(reward=1.0))
        run.complete("a")
    for form in ("slime", "tinker"):
        assert export(str(path), "--to", form)["trained_tokens"] == 3
        assert export(str(path), "--to", form, "--credit", "abandoned=train")["trained_tokens"] == 5
    assert export(str(path), "--to", "parquet")["trained_tokens"] == 5


def test_what_is_left_out_takes_nothing_else_with_it(tmp_path: Path) -> None:
    """An answer that was asked for again late in a conversation, and a side call that goes on from its history."""
    path = tmp_path / "run"
    with RunDir.create_or_continue(path, {}) as run, run.begin(SessionRecord(episode_id="a", group_id="g")) as journal:
        builder = SessionBuilder()
        new = {"versions": (("0", 0, 1),)}
        first = builder.root((1, 2), (3,), **new)
        second = builder.follow(first, (4,), (5,), **new)
        builder.follow(second, (6,), (9,), **new)  # abandoned
        third = builder.follow(second, (6,), (7,), **new)
        builder.follow(third, (8,), (10,), branch="side", **new)
        builder.follow(third, (11,), (12,), **new)
        for turn in builder.turns:
            journal.turn(turn)
        journal.append(SealedRecord(reward=1.0))
        run.complete("a")

    def trained(*choices: str) -> int:
        return int(export(str(path), "--to", "slime", *choices)["trained_tokens"])

    assert trained("--credit", "abandoned=train") == 6
    assert trained() == 5
    assert trained("--branches", "main_only") == 4
    export(str(path), "--to", "sft", "--set", "branches=main")
    rows = [json.loads(line) for line in (path / "export.sft.jsonl").read_text().splitlines()]
    assert [sum(row["loss_mask"]) for row in rows] == [4]


def test_settings_of_a_form_and_of_the_run_are_used(run_dir: Path) -> None:
    told = export(str(run_dir), "--to", "prime-rl", "--set", "env_name=mine")
    trace = json.loads(Path(told["file"]).read_text().splitlines()[0])
    assert trace["task"]["type"] == "mine"
    assert {call["sampling"]["temperature"] for call in trace["calls"]} == {0.8}


@pytest.fixture
def own_sampling(tmp_path: Path) -> Path:
    """A gateway's run: each session was opened with its own sampling, the configuration says something else."""
    path = tmp_path / "run"
    with RunDir.create_or_continue(path, {"sampling": {"temperature": 1.0, "top_p": 1.0}}) as run:
        for name, temperature in (("a", 0.5), ("b", 0.25)):
            sampling = {"temperature": temperature, "top_p": 0.9, "top_k": -1}
            with run.begin(SessionRecord(episode_id=name, group_id="g", sampling=sampling)) as journal:
                for turn in session(0).turns:
                    journal.turn(replace(turn, sampling=sampling))
                journal.append(SealedRecord(reward=temperature))
            run.complete(name)
    return path


def test_an_episode_is_exported_with_what_it_was_sampled_with(own_sampling: Path) -> None:
    told = export(str(own_sampling), "--to", "prime-rl")
    rows = [json.loads(line) for line in Path(told["file"]).read_text().splitlines()]
    assert [{call["sampling"]["temperature"] for call in row["calls"]} for row in rows] == [{0.5}, {0.25}]
    told = export(str(own_sampling), "--to", "verl")
    rows = [json.loads(line) for line in Path(told["file"]).read_text().splitlines()]
    assert [row["outputs"][0]["extra_fields"]["temperature"] for row in rows] == [0.5, 0.25]
    with pytest.raises(SandlotError, match="sample with top_p = 1"):
        export(str(own_sampling), "--to", "slime")


def test_the_list_shows_every_form() -> None:
    assert set(export("--list")) == set(TRAINERS.names())
    shown = CliRunner().invoke(app, ["export", "--list"], catch_exceptions=False)
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--to", "nonsense"], "no sandlot.trainers called 'nonsense'"),
        (["--to", "tinker", "--advantage", "best"], "estimator is 'best'; input should be 'grpo'"),
        (["--to", "slime", "--credit", "abandoned=keep"], "abandoned is 'keep'; input should be 'drop' or 'train'"),
        (["--to", "tinker", "--credit", "gamma=2"], "gamma is 2.0; it must be in"),
        (["--to", "tinker", "--credit", "nonsense=2"], "no choice of credit 'nonsense'"),
        (["--to", "tinker", "--branches", "turn_rewards"], "given in Python"),
        (["--to", "parquet", "--max-tokens", "9"], "parquet takes samples as they are"),
        (["--to", "verl", "--advantage", "rloo"], "verl has no place for advantages"),
        (["--to", "slime", "--branches", "turn_discount"], "no place for advantages"),
        (["--to", "slime", "--credit", "gamma=0.5"], "no place for advantages"),
        (["--to", "verl", "--set", "x"], "NAME=VALUE"),
        (["--to", "verl", "--set", "x=1"], "no option 'x'"),
        (["--to", "verl", "--set", "response_length=2"], "over 2"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], why: str, run_dir: Path) -> None:
    with pytest.raises(SandlotError, match=why):
        CliRunner().invoke(app, ["export", str(run_dir), *arguments], catch_exceptions=False)


def test_a_run_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--list"):
        CliRunner().invoke(app, ["export"], catch_exceptions=False)
