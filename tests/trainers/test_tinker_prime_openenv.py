"""Tinker, prime-rl and OpenEnv: their forms, and each rule that they break on or silently train wrongly by."""

import copy
from typing import Any

import numpy as np
import pytest

from sandlot.train.credit import CreditConfig, credit
from sandlot.train.turns import token_advantages
from sandlot.trainers import Export, TrainerDataError, openenv, prime_rl, tinker
from support.rows import make_row


def episodes() -> list:
    return [
        make_row("a", turns=[(3, 2), (2, 3)]),
        make_row("a", turns=[(4, 2)], index=1, branch="side"),
        make_row("b", reward=0.0),
    ]


def credited(**config: Any) -> list:
    return credit(episodes(), CreditConfig("grpo_nostd", **config)).samples


# -- Tinker -----------------------------------------------------------------------------------------------------------


def test_tinker_shifts_by_one_and_folds_the_weight_into_the_advantage() -> None:
    samples = credited()
    data = tinker.data(samples)
    row, inputs = samples[0], data[0]["loss_fn_inputs"]
    assert data[0]["model_input"] == row.tokens[:-1].tolist()
    assert inputs["target_tokens"] == row.tokens[1:].tolist()
    assert inputs["mask"] == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert inputs["advantages"] == pytest.approx([a * 0.5 / 7 for a in inputs["mask"]])
    assert inputs["logprobs"] == pytest.approx(row.logprobs[1:].tolist())
    # Summed over an episode the absolute advantage is the episode's, in however many datums it is.
    totals: dict[int, float] = {}
    for datum in data:
        key = datum["metadata"]["traj_idx"]
        totals[key] = totals.get(key, 0.0) + sum(datum["loss_fn_inputs"]["advantages"])
    assert totals == {0: pytest.approx(0.5), 1: pytest.approx(-0.5)}


def test_tinker_carries_credit_per_turn() -> None:
    samples = credited(branches="turn_discount", gamma=0.5)
    got = tinker.data(samples)[0]["loss_fn_inputs"]["advantages"]
    assert got == pytest.approx((token_advantages(samples[0]) * samples[0].loss_weight)[1:].tolist())
    assert len(set(got)) == 3


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("advantages", [0.1] * 9, "where nothing was sampled"),
        ("logprobs", [-0.1] * 9, "where nothing was sampled"),
        ("mask", [1.0], "mask has 1 entries"),
        ("target_tokens", [1] * 9, "not the input shifted"),
    ],
)
def test_tinker_traps(name: str, value: list[float], why: str) -> None:
    data = copy.deepcopy(tinker.data(credited()))
    tinker.validate(data)
    data[0]["loss_fn_inputs"][name] = value
    with pytest.raises(TrainerDataError, match=why):
        tinker.validate(data)


def test_a_server_that_averages_per_datum_cannot_take_fan_out() -> None:
    data = tinker.data(credited())
    with pytest.raises(TrainerDataError, match="averages per datum"):
        tinker.validate(data, reduces="mean")
    tinker.validate(tinker.data(credited(branches="main_only")), reduces="mean")


@pytest.mark.slow
def test_tinkers_own_types_take_the_datums() -> None:
    types = pytest.importorskip("tinker", reason="tinker is not installed here")
    samples = credited()
    datums = tinker.datums(samples)
    assert all(isinstance(datum, types.Datum) for datum in datums)
    assert datums[0].model_input.to_ints() == samples[0].tokens[:-1].tolist()
    assert set(datums[0].loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    assert datums[0].loss_fn_inputs["target_tokens"].tolist() == samples[0].tokens[1:].tolist()


# -- prime-rl ---------------------------------------------------------------------------------------------------------


def test_prime_rl_samples_have_one_length() -> None:
    samples = credited()
    first, second = prime_rl.traces(samples, env_name="swe", temperature=0.7)
    assert (first["id"], first["reward"], first["ok"], len(first["samples"])) == ("a", 1.0, True, 2)
    sample = first["samples"][0]
    assert {len(sample[name]) for name in (*prime_rl.PER_TOKEN, "rl_weights", "token_ids")} == {10}
    assert set(sample["temperatures"]) == {0.7}
    assert sample["env_name"] == "swe"
    assert sample["advantages"] == [0.5 * m for m in sample["mask"]]
    assert sum(sum(s["rl_weights"]) for s in first["samples"]) == pytest.approx(1)
    assert sum(sum(s["rl_weights"]) for s in second["samples"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logprobs": [0.0]}, "1 logprobs for 10 tokens"),
        ({"temperatures": [0.0] * 10}, "temperature 0"),
        ({"advantages": [0.5] * 10}, "credit where nothing was sampled"),
        ({"rl_weights": [0.5] * 10}, "credit where nothing was sampled"),
    ],
)
def test_prime_rl_traps(change: dict[str, Any], why: str) -> None:
    traces = copy.deepcopy(prime_rl.traces(credited()))
    prime_rl.validate(traces)
    traces[0]["samples"][0] |= change
    with pytest.raises(TrainerDataError, match=why):
        prime_rl.validate(traces)


def test_prime_rl_leaves_out_what_has_no_reward() -> None:
    (trace, *_) = prime_rl.traces(credited())
    for change in ({"ok": False}, {"reward": None}):
        with pytest.raises(TrainerDataError, match="left out"):
            prime_rl.validate([{**trace, **change}])


# -- OpenEnv ----------------------------------------------------------------------------------------------------------


def test_openenv_has_a_turn_per_span_with_its_exact_prompt() -> None:
    rows = episodes()
    first, second = openenv.traces(rows)
    turns = first["training_trace"]["turns"]
    assert [len(t["prompt_token_ids"]) for t in turns] == [3, 7, 4]
    assert turns[1]["prompt_token_ids"] == rows[0].tokens[:7].tolist()
    assert turns[1]["completion_token_ids"] == rows[0].tokens[7:].tolist()
    assert turns[1]["loss_mask"] == [0] * 7 + [1] * 3
    assert sum(sum(t["loss_mask"]) for t in turns) == sum(int(r.loss_mask.sum()) for r in rows[:2])
    assert (first["verify"], second["verify"]) == ({"env_reward": 1.0}, {"env_reward": 0.0})
    assert openenv.verify_result([]) == {"env_reward": None}


def test_openenv_rounds_what_is_above_zero_by_rounding() -> None:
    row = make_row()
    logprobs = row.logprobs.copy()
    logprobs[3] = 5e-5
    object.__setattr__(row, "logprobs", logprobs)
    (trace,) = openenv.traces([row])
    assert trace["training_trace"]["turns"][0]["per_token_logps"][0] == 0.0


def trace_with(**change: Any) -> dict[str, Any]:
    trace = copy.deepcopy(openenv.traces(episodes())[0]["training_trace"])
    trace["turns"][0] |= change
    return trace


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        (trace_with(loss_mask=[1, 0, 0, 1, 1]), "0 on the prompt"),
        (trace_with(loss_mask=[0, 0, 0, 1]), "0 on the prompt"),
        (trace_with(per_token_logps=[-1.0]), "1 logprobs for 2 tokens"),
        (trace_with(per_token_logps=[-1.0, 0.1]), "above 0"),
        (trace_with(per_token_logps=[-1.0, float("-inf")]), "not finite"),
        (trace_with(node_id="a-main-0-1"), "there twice"),
        (trace_with(completion_token_ids=[]), "no completion"),
        (trace_with(more=1), "exactly the keys"),
        ({"turns": []}, "schema_version 1"),
    ],
)
def test_openenv_traps(trace: dict[str, Any], why: str) -> None:
    openenv.validate(trace_with())
    with pytest.raises(TrainerDataError, match=why):
        openenv.validate(trace)


def test_exporters_take_the_temperature_from_the_run() -> None:
    export = Export(credited(), sampling={"temperature": 0.6}, options={"env_name": "mine"})
    from sandlot.trainers.prime_rl import EXPORTER

    (trace, _) = EXPORTER.rows(export)
    assert (trace["env_name"], np.unique(trace["samples"][0]["temperatures"]).tolist()) == ("mine", [0.6])
