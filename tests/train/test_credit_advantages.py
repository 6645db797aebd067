"""Advantages of one group, held to brute force and to the numbers one computes by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.train.advantage import EPSILON, advantages, max_at_k
from support.profiles import few

rewards_lists = st.lists(st.sampled_from((0.0, 0.25, 0.5, 1.0, 1 / 3)), min_size=1, max_size=7)


def test_by_hand() -> None:
    group = {"g": [1.0, 0.0, 0.0, 1.0]}
    std = math.sqrt(1 / 3)
    assert advantages(group, "grpo")["g"] == pytest.approx(
        [0.5 / (std + EPSILON), -0.5 / (std + EPSILON)] * 1 + [-0.5 / (std + EPSILON), 0.5 / (std + EPSILON)]
    )
    for name in ("grpo_nostd", "dr_grpo"):
        assert advantages(group, name)["g"] == [0.5, -0.5, -0.5, 0.5]
    assert advantages(group, "rloo")["g"] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert advantages(group, "none")["g"] == [1.0, 0.0, 0.0, 1.0]


@few
@given(
    rewards_lists, st.sampled_from(("grpo", "grpo_nostd", "rloo", "max_at_k", "reinforce_pp", "reinforce_pp_baseline"))
)
def test_always_finite_and_nothing_from_equal_rewards(rewards: list[float], name: str) -> None:
    values = advantages({"g": rewards}, name)["g"]  # type: ignore[arg-type]
    assert np.isfinite(values).all()
    if len(set(rewards)) == 1:
        assert values == [0.0] * len(rewards)
    elif name != "max_at_k":
        assert sum(values) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "grpo_nostd", "rloo", "max_at_k", "reinforce_pp", "reinforce_pp_baseline"])
def test_the_order_of_episodes_and_groups_changes_no_bit(name: str) -> None:
    """A batch that is looked at a group at a time must not differ from the whole of it in the last digit."""
    random = np.random.default_rng(5)
    for _ in range(50):
        groups = {f"g{n}": random.choice([0.0, 0.1, 0.3, 1 / 3, 0.7], 5).tolist() for n in range(3)}
        there = advantages(groups, name)  # type: ignore[arg-type]
        back = advantages({n: groups[n][::-1] for n in reversed(groups)}, name)  # type: ignore[arg-type]
        assert {n: values[::-1] for n, values in back.items()} == there


@few
@given(rewards_lists)
def test_rloo_is_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    want = [r - np.mean(rewards[:i] + rewards[i + 1 :]) if len(rewards) > 1 else 0.0 for i, r in enumerate(rewards)]
    assert advantages({"g": rewards}, "rloo")["g"] == pytest.approx(want)


@few
@given(rewards_lists, st.integers(2, 5))
def test_max_at_k_is_the_mean_marginal_gain_over_all_subsets(rewards: list[float], k: int) -> None:
    k = min(k, len(rewards))
    if k < 2:
        assert max_at_k(np.asarray(rewards), k).tolist() == [0.0] * len(rewards)
        return
    for i, value in enumerate(max_at_k(np.asarray(rewards), k)):
        others = rewards[:i] + rewards[i + 1 :]
        gains = [max(0.0, rewards[i] - max(rest)) for rest in itertools.combinations(others, k - 1)]
        assert value == pytest.approx(np.mean(gains))


@few
@given(st.dictionaries(st.sampled_from("abcd"), rewards_lists, min_size=1))
def test_batch_wide_estimators_whiten_over_episodes(groups: dict[str, list[float]]) -> None:
    joined = [r for rewards in groups.values() for r in rewards]
    values = [v for group in advantages(groups, "reinforce_pp").values() for v in group]
    if len(set(joined)) > 1:
        assert np.mean(values) == pytest.approx(0, abs=1e-9)
        assert np.std(values, ddof=1) == pytest.approx(1, rel=1e-4)
    baseline = advantages(groups, "reinforce_pp_baseline")
    for group in baseline.values():
        assert sum(group) == pytest.approx(0, abs=1e-9)


def test_ungraded_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="ungraded"):
        advantages({"g": [1.0, math.nan]}, "grpo")
