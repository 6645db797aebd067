"""What must not change the result: cutting an episode into more rows, the order of rows, other groups of the batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sandlot.errors import FailureKind
from sandlot.train.advantage import Estimator
from sandlot.train.credit import Branches, CreditConfig, Outcome, Weights, credit, credit_groups, denominator
from sandlot.train.episodes import gather
from sandlot.train.loss import policy_loss
from sandlot.train.offpolicy import Correction
from sandlot.trajectory.sample import Sample
from support.rows import batches, renumbered, split_row

# Each example runs credit, correction and loss several times.
some = settings(max_examples=min(settings.default.max_examples, 400) if settings.default else 100)

ESTIMATORS = get_args(Estimator)
IN_GROUP = tuple(name for name in ESTIMATORS if not name.startswith("reinforce_pp"))
"""Those that look at nothing but the group; the others whiten over the batch."""


def configs(estimators: Sequence[str] = ESTIMATORS, weights: Sequence[str] = get_args(Weights)) -> SearchStrategy[Any]:
    return st.builds(
        CreditConfig,
        estimator=st.sampled_from(estimators),
        weights=st.sampled_from(weights),
        branches=st.sampled_from(get_args(Branches)),
        abandoned=st.sampled_from(("drop", "train")),
        single=st.sampled_from(("zero", "drop")),
        uniform=st.sampled_from(("keep", "drop")),
        truncated=st.sampled_from(("train", "drop")),
        gamma=st.sampled_from((1.0, 0.9)),
        k=st.integers(1, 4),
    )


corrections = st.sampled_from(
    (
        None,
        Correction.tis(),
        Correction.icepop(),
        Correction.mis(0.7, 1.4),
        Correction("token", "keep", 0.8, 1.2),
        Correction("episode", "truncate", high=3.0),
        Correction("episode", "mask", 0.3, 3.0),
        Correction("episode_mean", "truncate", high=1.1),
        replace(Correction.tis(), max_staleness=1),
        replace(Correction.mis(0.7, 1.4), max_staleness=2),
    )
)


def turn_rewards(rows: list[Sample]) -> dict[str, float]:
    return {span.turn_id: (sum(span.turn_id.encode()) % 7) / 10 for row in rows for span in row.spans}


def new_logprobs(row: Sample) -> np.ndarray:
    """Logprobs of the trained policy that belong to the token, whatever row it is in."""
    return row.logprobs + np.sin(row.tokens.astype(np.float64)) * 0.3


def gradients(rows: list[Sample], config: CreditConfig, correction: Correction | None, *, scale: bool = True) -> dict:
    """Gradient of each trained token by (turn, offset); times the denominator if not `scale`."""
    done = credit(rows, config, turn_rewards=turn_rewards(rows))
    if not done.samples:
        return {}
    loss = policy_loss(done.samples, [new_logprobs(s) for s in done.samples], correction=correction, version=3)
    assert np.isfinite(loss.value)
    factor = 1.0 if scale else denominator(done.samples)
    found: dict[tuple[str, int], float] = {}
    for sample, gradient in zip(done.samples, loss.gradients, strict=True):
        assert np.all(gradient[sample.loss_mask == 0] == 0)
        for span in sample.spans:
            for k in range(span.length):
                assert (span.turn_id, k) not in found
                found[span.turn_id, k] = gradient[span.start + k] * factor
    return found


@some
@given(batches(), configs(), corrections, st.randoms(use_true_random=False))
def test_shuffled_rows_give_the_same_gradient(rows, config, correction, random) -> None:  # type: ignore[no-untyped-def]
    want = gradients(rows, config, correction)
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert gradients(shuffled, config, correction) == pytest.approx(want, abs=1e-9)


@some
@given(batches(), configs(weights=("per_episode", "per_token")), corrections, st.data())
def test_episodes_in_more_rows_give_the_same_gradient(rows, config, correction, data) -> None:  # type: ignore[no-untyped-def]
    parts: list[Sample] = []
    for row in rows:
        pieces = split_row(row, data.draw(st.integers(0, len(row.spans))))
        parts += pieces[:-1] + split_row(pieces[-1], data.draw(st.integers(0, 3)))
    assert gradients(renumbered(parts), config, correction) == pytest.approx(
        gradients(rows, config, correction), abs=1e-7
    )


@some
@given(batches(), batches("h"), configs(IN_GROUP), corrections)
def test_unrelated_groups_change_nothing_but_the_denominator(rows, others, config, correction) -> None:  # type: ignore[no-untyped-def]
    alone = gradients(rows, config, correction, scale=False)
    together = gradients(rows + others, config, correction, scale=False)
    assert {key: together[key] for key in alone} == pytest.approx(alone, abs=1e-9)


@some
@given(batches(), configs(), st.one_of(st.none(), st.integers(3, 12)))
def test_a_group_at_a_time_gives_what_the_whole_batch_gives(rows, config, max_tokens) -> None:  # type: ignore[no-untyped-def]
    config = replace(config, max_tokens=max_tokens)
    outcomes = [e.outcome for e in gather(rows)]
    outcomes += [Outcome("silent", "g0", 0.0), Outcome("lost", "nobody", None, FailureKind.INFRA_ERROR)]
    whole = credit(rows, config, outcomes=outcomes, turn_rewards=turn_rewards(rows))
    names = list(dict.fromkeys(row.group_id for row in rows))
    groups = [[row for row in rows if row.group_id == name] for name in names]
    parts = list(credit_groups(groups, config, outcomes=outcomes, turn_rewards=turn_rewards(rows)))

    def facts(samples: Sequence[Sample]) -> dict[tuple[str, int], Any]:
        return {(s.episode_id, s.index): (s.advantage, s.loss_weight, s.metadata, len(s.tokens)) for s in samples}

    assert facts([s for part in parts for s in part.samples]) == facts(whole.samples)
    assert {k: v for part in parts for k, v in part.dropped.items()} == whole.dropped


@some
@given(batches(), configs())
def test_credit_is_finite_and_touches_nothing_else(rows, config) -> None:  # type: ignore[no-untyped-def]
    done = credit(rows, config, turn_rewards=turn_rewards(rows))
    given_rows = {(r.episode_id, r.index): r for r in rows}
    for sample in done.samples:
        before = given_rows[sample.episode_id, sample.index]
        assert sample.advantage is not None
        assert np.isfinite(sample.advantage)
        assert sample.loss_weight > 0
        for name in ("tokens", "loss_mask", "logprobs", "spans", "reward"):
            assert getattr(sample, name) is getattr(before, name)
    assert {s.episode_id for s in done.samples} | set(done.dropped) == {r.episode_id for r in rows}
    assert not {s.episode_id for s in done.samples} & set(done.dropped)
    if config.weights == "per_episode":
        assert denominator(done.samples) == pytest.approx(len({s.episode_id for s in done.samples}))


@some
@given(batches(), st.sampled_from((None, Correction.tis(), Correction.icepop(0.9, 1.1))))
def test_the_gradient_is_the_derivative_of_the_value(rows, correction) -> None:  # type: ignore[no-untyped-def]
    done = credit(rows).samples
    if not done:
        return
    logprobs = [new_logprobs(s) for s in done]
    loss = policy_loss(done, logprobs, correction=correction)
    place = int(np.argmax(done[0].loss_mask))
    if correction is None:
        step = 1e-6
        values = []
        for sign in (1, -1):
            moved = [x.copy() for x in logprobs]
            moved[0][place] += sign * step
            values.append(policy_loss(done, moved).value)
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(loss.gradients[0][place], abs=1e-5)
    else:  # factors are constants: the value is linear in the logprobs
        by_hand = sum(float(np.sum(g * x)) for g, x in zip(loss.gradients, logprobs, strict=True))
        assert loss.value == pytest.approx(by_hand)
