"""Credit is given to episodes: baselines, denominators, weights, branches, and what is left outside."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sandlot.errors import ConfigError, FailureKind
from sandlot.train.credit import CreditConfig, CreditError, Outcome, credit, credit_groups, denominator
from sandlot.train.episodes import trained_tokens
from sandlot.train.turns import SPAN_ADVANTAGES, split_turns, token_advantages
from support.rows import make_row, renumbered, split_row


def rows_of(episode: str, count: int, **fields: object) -> list:
    return [make_row(episode, index=k, **fields) for k in range(count)]  # type: ignore[arg-type]


def by_episode(samples: list) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for s in samples:
        found.setdefault(s.episode_id, set()).add(round(s.advantage, 6))
    return found


NOSTD = CreditConfig("grpo_nostd")


def test_a_forked_rollout_counts_once_and_a_lone_survivor_gets_nothing() -> None:
    """d01: X has r1 in 3 rows with reward 1 and r2 in one with 0; Y has r3 only, its other attempt was aborted."""
    rows = rows_of("r1", 3, group="X") + rows_of("r2", 1, group="X", reward=0.0) + rows_of("r3", 1, group="Y")
    lost = Outcome("r4", "Y", None, FailureKind.ABORTED)
    done = credit(rows, NOSTD, outcomes=[lost])
    assert by_episode(done.samples) == {"r1": {0.5}, "r2": {-0.5}, "r3": {0.0}}
    assert done.dropped == {"r4": "aborted"}
    assert denominator(done.samples) == pytest.approx(3)
    weight_of_r1 = sum(s.loss_weight * trained_tokens(s) for s in done.samples if s.episode_id == "r1")
    assert weight_of_r1 == pytest.approx(1)
    dropped = credit(rows, replace(NOSTD, single="drop"), outcomes=[lost])
    assert set(by_episode(dropped.samples)) == {"r1", "r2"}
    assert dropped.dropped["r3"] == "the only graded episode of its group"


@pytest.mark.parametrize("failure", [FailureKind.INFRA_ERROR, FailureKind.GRADER_ERROR, FailureKind.ABORTED])
def test_what_is_not_the_policys_doing_is_outside_baseline_and_denominator(failure: FailureKind) -> None:
    """d02: the third of a group of four broke; even a reward of 0 that came with it must not count."""
    good = rows_of("a", 1) + rows_of("b", 1, reward=0.0) + rows_of("d", 1)
    broken = [replace(row, reward=0.0) for row in rows_of("c", 2)]
    with_it = credit(good + broken, outcomes=[Outcome("c", "g", 0.0, failure)])
    without = credit(good)
    assert by_episode(with_it.samples) == by_episode(without.samples)
    assert denominator(with_it.samples) == denominator(without.samples)
    assert with_it.dropped == {"c": str(failure)}


def test_ungraded_is_not_zero() -> None:
    done = credit(rows_of("a", 1) + rows_of("b", 1, reward=0.0) + rows_of("c", 1, reward=None), NOSTD)
    assert by_episode(done.samples) == {"a": {0.5}, "b": {-0.5}}
    assert done.dropped == {"c": "ungraded"}


@pytest.mark.parametrize("failure", [k for k in FailureKind if k.trainable])
def test_the_policys_own_failures_count(failure: FailureKind) -> None:
    rows = rows_of("a", 1) + rows_of("b", 1, reward=0.0)
    done = credit(rows, NOSTD, outcomes=[Outcome("b", "g", 0.0, failure), Outcome("c", "g", 0.0, failure)])
    assert by_episode(done.samples) == {"a": {0.666667}, "b": {-0.333333}}


def test_contradicting_siblings_are_an_error() -> None:
    rows = rows_of("a", 2)
    with pytest.raises(CreditError, match=r"rewards 1\.0 and 0\.0"):
        credit([rows[0], replace(rows[1], reward=0.0)])
    with pytest.raises(CreditError, match=r"rewards 1\.0 and None"):
        credit([rows[0], replace(rows[1], reward=None)])
    with pytest.raises(CreditError, match="groups 'g' and 'h'"):
        credit([rows[0], replace(rows[1], group_id="h")])
    with pytest.raises(CreditError, match="two rows with the index 0"):
        credit([rows[0], replace(rows[1], index=0)])
    with pytest.raises(CreditError, match="outcome says"):
        credit(rows, outcomes=[Outcome("a", "g", 0.5)])
    with pytest.raises(CreditError, match="told twice"):
        credit(rows, outcomes=[Outcome("z", "g", 0.5), Outcome("z", "g", 1.0)])


def test_weights_by_policy() -> None:
    rows = [
        make_row("a", turns=[(2, 4)]),
        make_row("a", turns=[(2, 6)], index=1),
        make_row("b", turns=[(2, 5)], reward=0.0),
    ]
    weights = {
        policy: [s.loss_weight for s in credit(rows, CreditConfig(weights=policy)).samples]  # type: ignore[arg-type]
        for policy in ("per_episode", "per_token", "per_sample")
    }
    assert weights["per_episode"] == pytest.approx([0.1, 0.1, 0.2])
    assert weights["per_token"] == [1.0, 1.0, 1.0]
    assert weights["per_sample"] == pytest.approx([1 / 4, 1 / 6, 1 / 5])
    totals = [denominator(credit(rows, CreditConfig(weights=p)).samples) for p in weights]  # type: ignore[arg-type]
    assert totals == pytest.approx([2, 15, 3])


def branchy() -> list:
    return [
        make_row("a", turns=[(2, 4), (1, 2)]),
        make_row("a", turns=[(2, 2)], index=1, branch="subagent:x"),
        make_row("b", turns=[(2, 5)], reward=0.0),
    ]


def test_credit_by_branch() -> None:
    main = credit(branchy(), replace(NOSTD, branches="main_only")).samples
    assert [(s.episode_id, s.index, s.advantage) for s in main] == [("a", 0, 0.5), ("b", 0, -0.5)]
    assert main[0].loss_weight == pytest.approx(1 / 6)
    share = credit(branchy(), replace(NOSTD, branches="by_share")).samples
    assert [s.advantage for s in share] == pytest.approx([0.5 * 6 / 8, 0.5 * 2 / 8, -0.5])
    discount = credit(branchy(), replace(NOSTD, branches="turn_discount", gamma=0.5)).samples
    assert discount[0].metadata[SPAN_ADVANTAGES] == [0.25, 0.5]
    assert discount[0].advantage == pytest.approx((0.25 * 4 + 0.5 * 2) / 6)
    assert (discount[1].advantage, discount[2].advantage) == (0.5, -0.5)
    assert token_advantages(discount[0]).tolist() == [0, 0, 0.25, 0.25, 0.25, 0.25, 0, 0.5, 0.5]


def test_an_episode_whose_work_was_all_in_side_branches_is_dropped_by_main_only() -> None:
    rows = [make_row("a", branch="side"), make_row("b", reward=0.0)]
    done = credit(rows, replace(NOSTD, branches="main_only"))
    assert done.dropped == {"a": "no row left to train"}
    assert by_episode(done.samples) == {"b": {-0.5}}


def test_turn_rewards_are_added_as_returns_to_go() -> None:
    rows = branchy()
    first, second = (span.turn_id for span in rows[0].spans)
    config = replace(NOSTD, branches="turn_rewards", gamma=0.5)
    done = credit(rows, config, turn_rewards={first: 0.1, second: 0.4}).samples
    assert done[0].metadata[SPAN_ADVANTAGES] == pytest.approx([0.5 + 0.1 + 0.2, 0.5 + 0.4])
    assert (done[1].advantage, done[2].advantage) == (0.5, -0.5)


def test_turns_of_different_credit_can_be_split_into_rows() -> None:
    done = credit(branchy(), replace(NOSTD, branches="turn_discount", gamma=0.5)).samples
    split = split_turns(done)
    assert [(s.episode_id, s.index, s.advantage) for s in split] == [
        ("a", 0, 0.25), ("a", 1, 0.5), ("a", 2, 0.5), ("b", 0, -0.5)]  # fmt: skip
    assert all(SPAN_ADVANTAGES not in s.metadata for s in split)
    assert [len(s.tokens) for s in split] == [6, 9, 4, 7]
    before = np.concatenate([token_advantages(s)[s.loss_mask == 1] for s in done])
    after = np.concatenate([token_advantages(s)[s.loss_mask == 1] for s in split])
    assert before.tolist() == after.tolist()


def test_abandoned_answers_are_trained_only_by_choice() -> None:
    rows = [make_row("a"), make_row("a", index=1, metadata={"abandoned": True}), make_row("b", reward=0.0)]
    assert [s.index for s in credit(rows).samples] == [0, 0]
    assert credit(rows).samples[0].loss_weight == pytest.approx(1 / 5)
    trained = credit(rows, CreditConfig(abandoned="train")).samples
    assert [s.index for s in trained] == [0, 1, 0]
    assert trained[0].loss_weight == pytest.approx(1 / 10)


def test_an_abandoned_answer_that_was_cut_does_not_cut_its_branch() -> None:
    """The agent asked again for what hit the limit, and went on: its branch did not end there."""
    rows = [make_row("a", metadata={"abandoned": True}, status="truncated"), make_row("a", index=1)]
    done = credit([*rows, make_row("b", reward=0.0)], CreditConfig(truncated="drop"))
    assert [(s.episode_id, s.index) for s in done.samples] == [("a", 1), ("b", 0)]
    both = credit([*rows, make_row("b", reward=0.0)], CreditConfig(truncated="drop", abandoned="train"))
    assert both.dropped == {"a": "no row left to train"}


def test_dapo_leaves_out_groups_without_signal_and_truncated_branches() -> None:
    same = rows_of("a", 1, group="same") + rows_of("b", 2, group="same")
    mixed = [
        make_row("c", "mixed"),
        make_row("c", "mixed", index=1, branch="side", status="truncated"),
        make_row("d", "mixed", reward=0.0),
        make_row("e", "mixed", reward=0.0, status="truncated"),
    ]
    done = credit(same + mixed, CreditConfig.dapo(estimator="grpo_nostd"))
    assert by_episode(done.samples) == {"c": {0.666667}, "d": {-0.333333}}
    assert done.dropped["a"] == done.dropped["b"] == "all rewards of its group are equal"
    assert done.dropped["e"] == "no row left to train"
    assert [s.loss_weight for s in done.samples] == [1.0, 1.0]


def test_overlong_rows_are_cut_at_whole_turns() -> None:
    long = make_row("a", turns=[(3, 2), (2, 3), (1, 4)])
    rows = [long, make_row("a", turns=[(20, 2)], index=1), make_row("b", turns=[(20, 2)], reward=0.0)]
    done = credit(rows, replace(NOSTD, max_tokens=12))
    (row,) = done.samples
    assert (len(row.tokens), row.status, row.metadata["cut"], len(row.spans)) == (10, "truncated", True, 2)
    assert row.tokens.tolist() == long.tokens[:10].tolist()
    assert (row.advantage, row.loss_weight) == (0.5, pytest.approx(1 / 5))
    assert done.dropped == {"b": "no row left to train"}


def test_nothing_comes_from_nothing() -> None:
    assert credit([]).samples == []
    assert denominator([]) == 0
    ungraded = credit(rows_of("a", 2, reward=None) + rows_of("b", 1, reward=None))
    assert (ungraded.samples, ungraded.dropped) == ([], {"a": "ungraded", "b": "ungraded"})
    assert ungraded.metrics["reward_mean"] == 0.0
    (nobody,) = credit_groups([], outcomes=[Outcome("a", "g", 1.0), Outcome("b", "g", None)])
    assert nobody.dropped == {"a": "no row left to train", "b": "ungraded"}
    for reward in (math.nan, math.inf):
        with pytest.raises(ValueError, match="no finite number"):
            credit([make_row("a", reward=reward), make_row("b")])
    with pytest.raises(CreditError, match="no outcome tells"):
        list(credit_groups([rows_of("a", 1)], outcomes=[]))
    with pytest.raises(ConfigError, match="gamma"):
        CreditConfig(gamma=0)
    with pytest.raises(ConfigError, match="k is 0"):
        CreditConfig(k=0)
    with pytest.raises(ValueError, match="credit it first"):
        token_advantages(make_row())


def test_a_row_can_be_split_and_put_back() -> None:
    row = make_row(turns=[(3, 2), (2, 3), (1, 4)])
    parts = renumbered(split_row(row, 1))
    assert [p.loss_mask.tolist() for p in parts] == [
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1],
    ]
    assert [len(p.weight_versions) for p in parts] == [5, 15]
