"""verl, SkyRL and AReaL: their forms, and each rule that they break on or silently train wrongly by."""

import copy
import itertools
import logging
from typing import Any

import numpy as np
import pytest

from sandlot.train.credit import CreditConfig, credit
from sandlot.train.loss import policy_loss
from sandlot.train.offpolicy import Correction
from sandlot.train.turns import token_advantages
from sandlot.trainers import Export, TrainerDataError, areal, skyrl, verl
from support.own_functions import own_functions
from support.rows import make_row


def episodes() -> list:
    return [
        make_row("a", turns=[(3, 2), (2, 3)], version="4"),
        make_row("a", turns=[(4, 2)], index=1, branch="side", version="5"),
        make_row("b", reward=0.0, status="truncated", version="5"),
        make_row("c", "h", version="5"),
    ]


# -- verl -------------------------------------------------------------------------------------------------------------


def test_verl_outputs_of_a_session() -> None:
    first, second, third = verl.rows(Export.of(episodes(), sampling={"temperature": 0.8}))
    assert [r["uid"] for r in (first, second, third)] == ["g", "g", "h"]
    assert first["session_id"] == "a"
    one, two = first["outputs"]
    assert (len(one["prompt_ids"]), len(one["response_ids"])) == (3, 7)
    assert one["response_mask"] == [1, 1, 0, 0, 1, 1, 1]
    assert [lp == 0 for lp in one["response_logprobs"]] == [False, False, True, True, False, False, False]
    assert (one["reward_score"], two["reward_score"]) == (None, 1.0)
    assert one["extra_fields"] == {
        "reward_extra_info": {}, "min_global_steps": 4, "max_global_steps": 4, "temperature": 0.8}  # fmt: skip
    assert second["outputs"][0]["reward_score"] == 0.0


def outputs(**changes: Any) -> list[dict[str, Any]]:
    found = copy.deepcopy(next(verl.rows(Export.of(episodes())))["outputs"])
    found[-1] |= changes
    return found


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, {"estimator": "gae"}, "compares rows"),
        ({}, {"padded": True}, "one output per session"),
        ({}, {"prompt_length": 3}, "prompt of 4 tokens is over 3"),
        ({}, {"response_length": 6}, "response of 7 tokens is over 6"),
        ({"response_mask": [1, 0]}, {}, "does not end on a sampled token"),
        ({"response_mask": [1]}, {}, "response_mask has 1 entries"),
        ({"response_logprobs": [-1.0] * 3}, {}, "response_logprobs has 3 entries"),
        ({"reward_score": None}, {}, "last output of the session"),
        ({"extra_fields": {}}, {}, "KeyError"),
        ({"prompt_ids": []}, {}, "is empty"),
    ],
)
def test_verl_traps(changes: dict[str, Any], options: dict[str, Any], why: str) -> None:
    verl.validate(outputs())
    with pytest.raises(TrainerDataError, match=why):
        verl.validate(outputs(**changes), **options)


def test_verl_rewards_on_every_output_are_refused() -> None:
    twice = outputs()
    twice[0]["reward_score"] = 1.0
    with pytest.raises(TrainerDataError, match="only there"):
        verl.validate(twice)
    with pytest.raises(TrainerDataError, match="fails the whole group"):
        verl.validate([])
    with pytest.raises(TrainerDataError, match="does not truncate"):
        verl.validate(outputs()[1:], padded=True)


def test_verl_caps_come_from_the_command_line() -> None:
    with pytest.raises(TrainerDataError, match="over 6"):
        list(verl.rows(Export.of(episodes(), options={"response_length": "6"})))
    for text in ("-1", "²"):
        with pytest.raises(TrainerDataError, match="whole number above 0"):
            list(verl.rows(Export.of(episodes(), options={"response_length": text})))


def test_versions_that_are_no_numbers_are_refused_where_a_trainer_counts() -> None:
    for rows, version in itertools.product((verl.rows, areal.EXPORTER.rows), ("abc", "²")):
        with pytest.raises(TrainerDataError, match="whole numbers"):
            list(rows(Export.of([make_row(version=version)])))


@pytest.mark.slow
def test_verls_own_type_takes_the_outputs() -> None:
    name = "verl.experimental.agent_loop.agent_loop"
    loop = pytest.importorskip(name, reason="verl is not installed here", exc_type=ImportError)
    for row in verl.rows(Export.of(episodes())):
        made = [loop.AgentLoopOutput(**output) for output in row["outputs"]]
        assert [m.reward_score is not None for m in made] == [False] * (len(made) - 1) + [True]
        assert [m.response_mask for m in made] == [o["response_mask"] for o in row["outputs"]]


@pytest.mark.slow
def test_verls_own_loss_weighs_as_the_reference_does() -> None:
    """Advantages, importance weights and the token mean by verl's functions, on one row per episode."""
    name = "verl.trainer.ppo.core_algos"
    algos = pytest.importorskip(name, reason="verl is not installed here", exc_type=ImportError)
    from verl.trainer.ppo import rollout_corr_helper  # type: ignore[import-not-found, unused-ignore]

    torch = pytest.importorskip("torch")
    rewards = {"g": (1.0, 0.0, 0.25, 0.25), "h": (0.0, 1.0), "i": (1.0,)}
    rows = [
        make_row(f"{g}{k}", g, reward=r, turns=[(2, 1 + k), (1, 2)])
        for g, rs in rewards.items()
        for k, r in enumerate(rs)
    ]
    width = max(len(row.tokens) for row in rows)

    def padded(values: list[Any]) -> Any:
        return torch.tensor(np.stack([np.pad(np.asarray(v, dtype=np.float64), (0, width - len(v))) for v in values]))

    mask = padded([row.loss_mask for row in rows])
    outcome = torch.zeros_like(mask)
    outcome[:, 0] = torch.tensor([row.reward for row in rows])
    index = np.asarray([row.group_id for row in rows])
    for estimator, function, options in (
        ("grpo", algos.compute_grpo_outcome_advantage, {}),
        ("grpo_nostd", algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", algos.compute_rloo_outcome_advantage, {}),
    ):
        theirs, _ = function(outcome.clone(), mask, index, **options)
        done = credit(rows, CreditConfig(estimator, weights="per_token")).samples
        ours = padded([token_advantages(row) for row in done])
        assert ours[:-1].numpy() == pytest.approx(theirs[:-1].numpy(), abs=1e-6)
        # verl gives the only episode of a group its own reward, as if others had failed.
        assert (float(ours[-1].max()), float(theirs[-1].max())) == pytest.approx((0.0, 1.0), abs=1e-5)
    new = [row.logprobs + np.where(row.loss_mask == 1, np.sin(row.tokens), 0.0) for row in done]
    ratios = padded([np.where(row.loss_mask == 1, x - row.logprobs, 0.0) for row, x in zip(done, new, strict=True)])
    for correction, threshold in ((Correction.tis(1.5), 1.5), (Correction.icepop(0.8, 1.6), "0.8_1.6")):
        own = policy_loss(done, new, correction=correction)
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(ratios, mask, "token", threshold)
        loss = algos.agg_loss(weights * -ours * padded(new), mask, "token-mean")
        assert own.value == pytest.approx(float(loss), rel=1e-9)


# -- SkyRL ------------------------------------------------------------------------------------------------------------


def test_skyrl_generator_output() -> None:
    rows = episodes()
    output = skyrl.generator_output([rows[1], rows[3], rows[0], rows[2]])
    assert [tuple(t.values()) for t in output["trajectory_ids"]] == [("g", 0), ("g", 0), ("h", 0), ("g", 1)]
    assert output["is_last_step"] == [False, True, True, True]
    assert output["rewards"] == [0.0, 1.0, 1.0, 0.0]
    assert output["stop_reasons"] == ["stop", "stop", "stop", "length"]
    assert output["loss_masks"][0] == [1, 1, 0, 0, 1, 1, 1]
    assert [len(x) for x in output["rollout_logprobs"]] == [len(x) for x in output["response_ids"]]


def skyrl_output(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(skyrl.generator_output(episodes())), **changes}


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, {"estimator": "reinforce++"}, "works on rows"),
        ({"is_last_step": [False, True, True, np.True_]}, {}, "real booleans"),
        ({"is_last_step": [False, True, True, False]}, {}, "end of its trajectory"),
        ({"is_last_step": [False, False, True, True], "rewards": [0.0, 0.0, 0.0, 1.0]}, {}, "has no last step"),
        ({"rewards": [1.0, 1.0, 0.0, 1.0]}, {}, "not the last step"),
        ({"rewards": [0.0, [0.0, 1.0], 0.0, 1.0]}, {}, "numbers for some"),
        ({"rollout_logprobs": None}, {}, "must have logprobs"),
        ({"rollout_expert_indices": [[0]]}, {}, "routed experts"),
        ({"stop_reasons": ["stop"]}, {}, "1 stop_reasons for 4 rows"),
        ({"loss_masks": [[1]] * 4}, {}, "another length"),
        ({"response_ids": []}, {}, "no rows"),
    ],
)
def test_skyrl_traps(changes: dict[str, Any], options: dict[str, Any], why: str) -> None:
    skyrl.validate(skyrl_output())
    with pytest.raises(TrainerDataError, match=why):
        skyrl.validate(skyrl_output(**changes), **options)


def test_skyrl_rows_of_a_trajectory_are_contiguous() -> None:
    output = skyrl_output()
    for name in ("trajectory_ids", "is_last_step"):
        output[name] = [output[name][1], output[name][2], output[name][1], output[name][3]]
    output["rewards"] = [1.0, 0.0, 1.0, 1.0]
    with pytest.raises(TrainerDataError, match="not contiguous"):
        skyrl.validate(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"is_last_step": [False, True, True, False]},
        {"is_last_step": [False, False, True, True], "rewards": [0.0, 0.0, 0.0, 1.0]},
        {"rewards": [0.0, [0.0, 1.0], 0.0, 1.0]},
        {"loss_masks": [[1]] * 4},
    ],
)
def test_skyrls_own_validator_agrees(changes: dict[str, Any]) -> None:
    names = ("validate_generator_output", "_validate_step_wise_fields")
    functions = own_functions("skyrl", "train/utils/trainer_utils.py", *names, np=np, GeneratorOutput=dict)
    if functions is None:
        pytest.skip("SkyRL is not installed here")
    own = functions["validate_generator_output"]
    own(3, skyrl_output(), step_wise=True)
    with pytest.raises(TrainerDataError):
        skyrl.validate(skyrl_output(**changes))
    with pytest.raises(AssertionError):
        own(3, skyrl_output(**changes), step_wise=True)


# -- AReaL ------------------------------------------------------------------------------------------------------------


def test_areal_arrays_cover_the_prompt_and_are_not_shifted() -> None:
    row = areal.rows(episodes())[0]
    assert set(row) == set(areal.KEYS)
    assert row["input_ids"].dtype == row["versions"].dtype == np.int64
    assert row["input_ids"].shape == row["logprobs"].shape == (1, 10)
    assert row["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 1, 1, 1]]
    assert row["versions"].tolist() == [[-1, -1, -1, 4, 4, -1, -1, 4, 4, 4]]
    assert (row["logprobs"] != 0).astype(int).tolist() == row["loss_mask"].tolist()
    assert row["rewards"].tolist() == [1.0]


def test_areal_traps() -> None:
    rows = areal.rows(episodes())
    areal.validate(rows, group_size=2, adv_norm="batch", episodes=3)
    with pytest.raises(TrainerDataError, match="set adv_norm to batch"):
        areal.validate(rows, group_size=2, adv_norm="group", episodes=3)
    with pytest.raises(TrainerDataError, match="other keys"):
        areal.validate([rows[0], {**rows[1], "more": 1}])
    with pytest.raises(TrainerDataError, match="logprobs is"):
        areal.validate([{**rows[0], "logprobs": rows[0]["logprobs"][0]}])
    with pytest.raises(TrainerDataError, match="version where nothing"):
        areal.validate([{**rows[0], "versions": np.zeros((1, 10), dtype=np.int64)}])
    with pytest.raises(TrainerDataError, match="one finite reward"):
        areal.validate([{**rows[0], "rewards": np.asarray([np.nan])}])


def test_areal_tensors_pad_versions_with_minus_one() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    batch = areal.tensors(episodes())
    assert batch["input_ids"].shape == (4, 10)
    assert batch["versions"][1].tolist() == [-1] * 4 + [5, 5] + [-1] * 4
    assert batch["attention_mask"].sum(1).tolist() == [10, 6, 10, 10]
    assert batch["rewards"].dtype == torch.float32


@pytest.mark.slow
def test_areals_own_check_and_padding_take_the_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    known: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "InteractionWithTokenLogpReward": type(None)}
    check = own_functions("areal", "infra/workflow_executor.py", "check_trajectory_format", logging=logging, **known)
    names = ("concat_padded_tensors", "_pad_cat_dim0", "is_multi_modal_key", "get_batch_size")
    pad = own_functions("areal", "utils/data.py", *names, **known)
    if check is None or pad is None:
        pytest.skip("AReaL is not installed here")
    batch = areal.tensors(episodes())
    assert check["check_trajectory_format"](batch, batch_size=4, expected_keys=set(areal.KEYS))
    rows = [{name: torch.from_numpy(value) for name, value in row.items()} for row in areal.rows(episodes())]
    theirs = pad["concat_padded_tensors"](rows)
    for name in areal.KEYS:
        padding = (batch["attention_mask"] == 0) if name == "versions" else torch.zeros(1, dtype=torch.bool)
        assert torch.equal(batch[name].masked_fill(padding, 0), theirs[name]), name  # AReaL pads versions with 0
