"""Off-policy factors: bounds, masks, ratios over whole episodes, versions per token."""

from dataclasses import replace

import numpy as np
import pytest

from sandlot.train.offpolicy import Correction, correct, log_ratios, proximal_logprobs, staleness
from sandlot.trajectory.sample import Sample
from support.rows import make_row, renumbered, split_row

ROW = make_row(turns=[(2, 3)])


def moved(row: Sample, *ratios: float) -> np.ndarray:
    """Logprobs that make these ratios at the trained tokens."""
    out = np.full(len(row.tokens), np.nan)
    out[row.loss_mask == 1] = row.logprobs[row.loss_mask == 1].astype(np.float64) + np.log(ratios)
    return out


def trained(row: Sample, values: np.ndarray) -> list[float]:
    assert np.all(values[row.loss_mask == 0] == 0)
    return list(values[row.loss_mask == 1])


@pytest.mark.parametrize(
    ("correction", "want"),
    [
        (Correction.tis(2.0), [0.25, 1.0, 2.0]),
        (Correction.icepop(0.5, 5.0), [0.0, 1.0, 4.0]),
        (Correction("token", "keep", 0.5, 3.0), [0.0, 1.0, 0.0]),
        (Correction("episode", "truncate", high=9.0), [1.0, 1.0, 1.0]),
        (Correction.mis(), [1.0, 1.0, 1.0]),
    ],
)
def test_factors_by_token(correction: Correction, want: list[float]) -> None:
    factors = correct([ROW], [moved(ROW, 0.25, 1.0, 4.0)], correction)
    assert trained(ROW, factors.values[0]) == pytest.approx(want, rel=1e-5)
    assert factors.metrics["masked_share"] == pytest.approx(want.count(0.0) / 3)


def test_sequence_ratios_are_of_the_episode_not_of_the_row() -> None:
    whole = make_row(turns=[(2, 2), (1, 2)])
    parts = renumbered(split_row(whole, 1))
    one = correct([whole], [moved(whole, 2.0, 1.0, 1.0, 0.25)], Correction("episode", "truncate", high=9))
    two = correct(
        parts, [moved(parts[0], 2.0, 1.0), moved(parts[1], 1.0, 0.25)], Correction("episode", "truncate", high=9)
    )
    assert trained(whole, one.values[0]) == pytest.approx([0.5] * 4, rel=1e-5)
    assert trained(parts[0], two.values[0]) + trained(parts[1], two.values[1]) == pytest.approx([0.5] * 4, rel=1e-5)
    rejected = correct(parts, [moved(parts[0], 1.0, 1.0), moved(parts[1], 1.0, 2.0)], Correction.mis())
    assert not any(np.any(v) for v in rejected.values)
    assert rejected.metrics["masked_share"] == 1.0


def test_versions_are_read_per_token() -> None:
    row = replace(ROW, weight_versions=("", "", "4", "5", "6"))
    assert staleness(row, 6).tolist() == [0, 0, 2, 1, 0]
    factors = correct([row], [moved(row, 1.0, 1.0, 1.0)], replace(Correction.tis(), max_staleness=1), version=6)
    assert trained(row, factors.values[0]) == pytest.approx([0, 1, 1], rel=1e-5)
    prox = proximal_logprobs(row, moved(row, np.e, np.e, np.e), 6)
    assert (prox - row.logprobs)[2:] == pytest.approx([0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match="later weights"):
        staleness(row, 5)
    for version in ("a", "²", "--1"):
        with pytest.raises(ValueError, match="no whole number"):
            staleness(replace(ROW, weight_versions=("", "", version, version, version)), 5)
    with pytest.raises(ValueError, match="needs the version"):
        correct([row], [moved(row, 1.0, 1.0, 1.0)], replace(Correction.tis(), max_staleness=1))


def test_bad_logprobs_are_refused_and_extreme_ones_stay_finite() -> None:
    with pytest.raises(ValueError, match="not shifted"):
        log_ratios([ROW], [np.zeros(4)])
    with pytest.raises(ValueError, match="not finite"):
        log_ratios([ROW], [np.full(5, np.nan)])
    extreme = np.where(ROW.loss_mask == 1, 900.0, 0.0)
    for correction in (Correction.tis(), Correction.icepop(), Correction("episode", "mask", high=5)):
        factors = correct([ROW], [extreme], correction)
        assert np.isfinite(factors.values[0]).all()
        assert all(np.isfinite(v) for v in factors.metrics.values())
