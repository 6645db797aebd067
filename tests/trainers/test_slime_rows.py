"""slime and vime: rows, the rules they leave unchecked, and rewards under fan-out."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from sandlot.errors import ConfigError, MissingDependencyError
from sandlot.train.credit import CreditConfig, CreditError, credit
from sandlot.trainers import Export, TrainerDataError
from sandlot.trainers.slime import EXPORTER, keep_group, reward_post_process
from sandlot.trainers.slime_family import aborted_fields, rows, validate
from sandlot.trainers.slime_hook import sampling_of
from support.profiles import few
from support.rows import batches, make_row
from support.slime_sample import StandIn, arguments, needs_reward_model, sampling_params, train_data


def stand_in(row: dict[str, Any]) -> StandIn:
    return StandIn(**{**row, "status": StandIn.Status(row["status"])})


def fan_out() -> list:
    """d01: prompt X with r1 (reward 1, three rows) and r2 (reward 0, one row); prompt Y with r3 only."""
    return [
        *(make_row("r1", "X", index=k) for k in range(3)),
        make_row("r2", "X", reward=0.0),
        make_row("r3", "Y"),
    ]


def as_rollout_data(samples: list) -> list[list[list[StandIn]]]:
    """prompt × rollout × rows, as the trainer gets it."""
    nested: dict[int, dict[int, list[StandIn]]] = {}
    for row in rows(Export.of(samples)):
        nested.setdefault(row["group_index"], {}).setdefault(row["rollout_id"], []).append(stand_in(row))
    return [list(rollouts.values()) for rollouts in nested.values()]


def test_fields_are_aligned_to_the_response() -> None:
    (row,) = rows(Export.of([make_row("a", turns=[(3, 2), (2, 3)], version="7")]))
    assert (len(row["tokens"]), row["response_length"]) == (10, 7)
    assert row["loss_mask"] == [1, 1, 0, 0, 1, 1, 1]
    assert [lp == 0 for lp in row["rollout_log_probs"]] == [False, False, True, True, False, False, False]
    assert (row["weight_versions"], row["status"], row["reward"]) == (["7", "7"], "completed", 1.0)
    assert (row["metadata"]["episode_id"], row["remove_sample"]) == ("a", False)


def test_fan_out_is_normalized_by_rollout() -> None:
    data = train_data(arguments(grpo_std_normalization=False), as_rollout_data(fan_out()), reward_post_process)
    assert data["rewards"] == [0.5, 0.5, 0.5, -0.5, 0.0]
    assert data["raw_reward"] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert data["rollout_ids"] == [0, 0, 0, 1, 2]
    assert data["rollout_mask_sums"] == [15, 15, 15, 5, 5]


def test_an_aborted_rollout_is_outside_everything() -> None:
    """d02: the third of a group of four broke."""
    data = as_rollout_data([make_row("a"), make_row("b", reward=0.0), make_row("d")])
    broken = StandIn(group_index=0, index=9, rollout_id=9)
    for name, value in aborted_fields("sandbox creation failed").items():
        setattr(broken, name, StandIn.Status(value) if name == "status" else value)
    data[0].insert(2, [broken])
    assert not needs_reward_model([broken])
    converted = train_data(arguments(grpo_std_normalization=False), data, reward_post_process)
    assert converted["rewards"] == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])
    assert converted["loss_masks"][2] == [0]
    assert converted["rollout_mask_sums"][2] == 0
    assert {len(broken.loss_mask or ()), len(broken.rollout_log_probs or ()), broken.response_length} == {1}
    assert len(broken.tokens) == 2


@few
@given(batches())
def test_the_hook_gives_what_credit_gives(samples: list) -> None:
    graded = [s for s in samples if s.reward is not None]
    if not graded:
        return
    data = train_data(arguments(), as_rollout_data(graded), reward_post_process)
    own = credit(graded, CreditConfig("grpo", abandoned="train")).samples
    by_row = {(s.episode_id, s.index): s.advantage for s in own}
    order = list(rows(Export.of(graded)))
    want = [by_row[r["metadata"]["episode_id"], r["metadata"]["row"]] for r in order]
    assert data["rewards"] == pytest.approx(want)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, [0.70710578, 0.70710578, 0.70710578, -0.70710578, 0.0]),
        ({"advantage_estimator": "gspo"}, [0.70710578, 0.70710578, 0.70710578, -0.70710578, 0.0]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [0.5, 0.5, 0.5, -0.5, 0.0]),
        ({"advantage_estimator": "ppo"}, [1.0, 1.0, 1.0, 0.0, 1.0]),
        ({"rewards_normalization": False}, [1.0, 1.0, 1.0, 0.0, 1.0]),
        ({"reward_key": "score"}, [0.70710578, 0.70710578, 0.70710578, -0.70710578, 0.0]),
    ],
)
def test_the_trainers_own_settings_hold(changes: dict[str, Any], want: list[float]) -> None:
    data = as_rollout_data(fan_out())
    if "reward_key" in changes:
        for sample in (s for group in data for rollout in group for s in rollout):
            sample.reward = {"score": sample.reward}
    assert train_data(arguments(**changes), data, reward_post_process)["rewards"] == pytest.approx(want, rel=1e-5)


def test_contradicting_siblings_and_missing_ids_are_errors() -> None:
    samples = [s for group in as_rollout_data(fan_out()) for rollout in group for s in rollout]
    samples[1].reward = 0.0
    with pytest.raises(TrainerDataError, match="different rewards"):
        reward_post_process(arguments(), samples)
    samples[1].reward = 1.0
    samples[2].rollout_id = None
    with pytest.raises(TrainerDataError, match="no rollout_id"):
        reward_post_process(arguments(), samples)
    with pytest.raises(CreditError, match="siblings"):
        list(rows(Export.of([make_row("a"), make_row("a", index=1, reward=0.0)])))


def test_groups_without_a_signal_can_be_filtered() -> None:
    x, y = as_rollout_data(fan_out())
    assert keep_group(arguments(), x)
    assert not keep_group(arguments(), y)
    aborted = copy.deepcopy(x)
    for sample in aborted[1]:
        sample.status, sample.remove_sample = StandIn.Status.ABORTED, True
    assert not keep_group(arguments(), aborted)


TRAPS = [
    ({"loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]}, "length of the response"),
    ({"rollout_log_probs": None}, "length of the response"),
    ({"rollout_log_probs": [-0.1] * 7}, "not sampled has a logprob"),
    ({"rollout_id": None}, "rollouts of their own"),
    ({"reward": None}, "reward model"),
    ({"reward": float("nan")}, "its reward is nan"),
    ({"status": "pending"}, "its status"),
    ({"status": "aborted"}, "empty mask"),
    ({"remove_sample": True}, "empty mask"),
    ({"response_length": 0}, "a response of 0"),
    ({"loss_mask": [1, 1, 0, 0, 1, 1, 0], "rollout_log_probs": [-1, -1, 0, 0, -1, -1, 0]}, "end on a sampled token"),
]


@pytest.mark.parametrize(("change", "why"), TRAPS)
def test_every_trap_is_refused(change: dict[str, Any], why: str) -> None:
    (row,) = rows(Export.of([make_row("a", turns=[(3, 2), (2, 3)])]))
    validate([row])
    with pytest.raises(TrainerDataError, match=why):
        validate([{**row, **change}])


def test_top_p_needs_replay_data() -> None:
    with pytest.raises(TrainerDataError, match="top_p = 1"):
        list(rows(Export.of([make_row("a")], sampling={"top_p": 0.9})))
    (row,) = rows(Export.of([make_row("a")]))
    validate([{**row, "rollout_top_p_token_offsets": list(range(row["response_length"] + 1))}], top_p=0.9)


def test_sampling_is_the_trainers_and_what_cannot_be_trained_is_refused() -> None:
    sampling = sampling_of(sampling_params(temperature=0.7, stop_token_ids=[5], seed=3), evaluation=False)
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids, sampling.seed) == (0.7, 512, (5,), 3)
    for change, why in (({"top_p": 0.9}, "top_p"), ({"temperature": 0.0}, "temperature 0"), ({"stop": ["x"]}, "stop")):
        with pytest.raises(Exception, match=why):
            sampling_of(sampling_params(**change), evaluation=False)
    assert sampling_of(sampling_params(top_p=0.9, temperature=0.0), evaluation=True).top_p == 0.9


def test_a_sampling_parameter_that_would_be_left_out_is_refused() -> None:
    for change in (
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 8},
        {"custom_params": {"return_top_p_token_ids": True}},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(change))}=.* leave it out"):
            sampling_of(sampling_params(**change), evaluation=True)
    neutral = sampling_params(repetition_penalty=1.0, min_new_tokens=0, sampling_seed=5, skip_special_tokens=False)
    assert sampling_of(neutral, evaluation=False).seed == 5


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    assert EXPORTER.write(tmp_path / "rows.jsonl", Export.of(fan_out())) == 5
    read = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert read == list(rows(Export.of(fan_out())))
    try:
        import torch
    except ImportError:
        with pytest.raises(MissingDependencyError, match="torch"):
            EXPORTER.write(tmp_path / "rows.pt", Export.of(fan_out()))
    else:
        EXPORTER.write(tmp_path / "rows.pt", Export.of(fan_out()))
        assert len(torch.load(tmp_path / "rows.pt", weights_only=False)["samples"]) == 5


def test_per_turn_credit_is_refused_where_a_row_has_one_advantage() -> None:
    done = credit(
        [make_row("a", turns=[(2, 2), (1, 2)]), make_row("b", reward=0.0)],
        replace(CreditConfig(branches="turn_discount"), gamma=0.5),
    )
    with pytest.raises(TrainerDataError, match="split_turns"):
        list(rows(Export.of(done.samples)))
