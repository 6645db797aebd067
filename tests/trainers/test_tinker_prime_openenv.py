"""Tinker, prime-rl and OpenEnv: their forms, and each rule that they break on or silently train wrongly by."""

import copy
from typing import Any

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


def streams(trace: dict[str, Any]) -> list[dict[str, list[float]]]:
    """What the branches of a trace are: its nodes from root to leaf, joined; every stream as long as the tokens."""
    parents = {node["parent"] for node in trace["nodes"]}
    found = []
    for leaf in (k for k in range(len(trace["nodes"])) if k not in parents):
        path, at = [], leaf
        while at is not None:
            path.insert(0, trace["nodes"][at])
            at = path[0]["parent"]
        joined: dict[str, list[float]] = {"token_ids": [], "mask": [], "logprobs": [], "advantages": [], "rl": []}
        for node in path:
            count, sampled = len(node["token_ids"]), sum(node["mask"])
            joined["token_ids"] += node["token_ids"]
            joined["mask"] += node["mask"]
            joined["rl"] += node.get("loss_weights", {}).get("rl", [0.0] * count)
            for name in ("logprobs", "advantages"):
                joined[name] += node.get(name) or [0.0] * count
                assert len(node.get(name, ())) == sampled
        found.append(joined)
    return found


def check_streams(found: list[dict[str, list[float]]], samples: list) -> None:
    """The branches are the rows, token by token."""
    assert len(found) == len(samples)
    for branch, s in zip(found, samples, strict=True):
        assert branch["token_ids"] == s.tokens.tolist()
        assert branch["mask"] == (s.loss_mask == 1).tolist()
        assert branch["logprobs"] == s.logprobs.astype(float).tolist()
        assert branch["advantages"] == pytest.approx(token_advantages(s).tolist())


def test_prime_rl_traces_have_a_branch_per_row() -> None:
    samples = credited()
    first, second = prime_rl.traces(samples, env_name="swe", temperature=0.7)
    assert (first["id"], first["task"]["key"], first["rewards"]) == ("a", "g", {"solved": {"score": 1.0}})
    check_streams(streams(first) + streams(second), samples)
    assert {call["sampling"]["temperature"] for call in first["calls"]} == {0.7}
    assert [first["nodes"][call["node"]]["sampled"] for call in first["calls"]] == [True] * 3
    # The loss is a mean over tokens: every episode has the same share of it, and the weights are 1 in the mean.
    shares = [sum(sum(branch["rl"]) for branch in streams(trace)) for trace in (first, second)]
    assert shares[0] == pytest.approx(shares[1])
    assert sum(shares) == pytest.approx(sum(int(s.loss_mask.sum()) for s in samples))


def test_prime_rl_carries_credit_per_turn() -> None:
    samples = credited(branches="turn_discount", gamma=0.5)
    check_streams([branch for trace in prime_rl.traces(samples) for branch in streams(trace)], samples)


@pytest.mark.slow
def test_verifiers_own_trace_takes_them() -> None:
    own = pytest.importorskip("verifiers.v1.trace", reason="verifiers is not installed here", exc_type=ImportError)
    samples = credited(branches="turn_discount", gamma=0.5)
    branches = []
    for row in prime_rl.traces(samples, temperature=0.7):
        read = own.WireTrace.model_validate(row)
        assert (read.id, read.ok, read.reward, read.task.key) == (
            row["id"],
            True,
            samples[-1].reward or read.reward,
            "g",
        )
        branches += read.branches
    check_streams(
        [
            {
                "token_ids": b.token_ids,
                "mask": b.sampled_mask,
                "logprobs": b.logprobs,
                "advantages": b.advantages,
            }
            for b in branches
        ],
        samples,
    )
    assert [b.loss_weights("rl") for b in branches] == [s["rl"] for t in prime_rl.traces(samples) for s in streams(t)]


def node_with(**change: Any) -> Any:
    """A trace whose second node, the first sampled one, is changed."""
    return lambda trace: trace["nodes"][1].update(change)


def trace_as(**change: Any) -> Any:
    return lambda trace: trace.update(change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (node_with(logprobs=[0.0]), "1 logprobs for 2 sampled tokens"),
        (node_with(advantages=None), "0 advantages for 2 sampled tokens"),
        (node_with(mask=[True]), "1 mask for 2 tokens"),
        (node_with(sampled=False), "or neither"),
        (node_with(parent=4), "no earlier node"),
        (node_with(loss_weights={"rl": [1.0]}), "1 rl weights for 2 tokens"),
        (lambda trace: trace["nodes"][2].update(loss_weights={"rl": [1.0, 1.0]}), "where nothing was sampled"),
        (lambda trace: trace["nodes"][2].update(parent=0), "forks"),
        (lambda trace: trace["calls"][0]["sampling"].update(temperature=0.0), "temperature 0"),
        (trace_as(ok=False), "leave it out"),
        (trace_as(rewards={"solved": None}), "leave it out"),
    ],
)
def test_prime_rl_traps(change: Any, why: str) -> None:
    (trace, *_) = copy.deepcopy(prime_rl.traces(credited()))
    prime_rl.validate([trace])
    change(trace)
    with pytest.raises(TrainerDataError, match=why):
        prime_rl.validate([trace])


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


@pytest.mark.slow
def test_openenvs_own_trace_takes_them() -> None:
    name = "openenv.core.harness.training"
    own = pytest.importorskip(name, reason="OpenEnv is not installed here", exc_type=ImportError)
    for row in openenv.traces(episodes()):
        read = own.TrainingTrace.model_validate(row["training_trace"])
        assert read.model_dump() == row["training_trace"]
    for change in ({"loss_mask": [1, 0, 0, 1, 1]}, {"per_token_logps": [-1.0, 0.1]}, {"node_id": "a-main-0-1"}):
        with pytest.raises(ValueError, match=r"node_id|invalid training turn"):
            own.TrainingTrace.model_validate(trace_with(**change))


def test_exporters_take_the_temperature_from_the_run() -> None:
    export = Export.of(credited(), sampling={"temperature": 0.6}, options={"env_name": "mine"})
    (trace, _) = prime_rl.EXPORTER.rows(export)
    assert (trace["task"]["type"], {c["sampling"]["temperature"] for c in trace["calls"]}) == ("mine", {0.6})
