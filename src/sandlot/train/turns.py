"""Credit that differs from turn to turn: advantages per span, carried by rows and split where a trainer cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sandlot.trajectory.sample import Sample, Span

SPAN_ADVANTAGES = "span_advantages"
"""Metadata of a credited row whose spans differ: one advantage per span. `Sample.advantage` is then their mean over
the trained tokens."""


def token_advantages(sample: Sample) -> npt.NDArray[np.float32]:
    """Advantage of each token (float32 [L]), 0 off the mask. `ValueError` when the row has no credit yet."""
    if sample.advantage is None:
        raise ValueError(f"row {sample.index} of episode {sample.episode_id!r} has no advantage; credit it first")
    values = np.zeros(len(sample.tokens), dtype=np.float32)
    per_span = sample.metadata.get(SPAN_ADVANTAGES)
    if per_span is None:
        values[sample.loss_mask == 1] = sample.advantage
    else:
        for span, advantage in zip(sample.spans, per_span, strict=True):
            values[span.start : span.start + span.length] = advantage
    return values


def with_span_advantages(sample: Sample, per_span: Sequence[float]) -> Sample:
    """The row with one advantage per span; a plain one where all are equal."""
    if len(set(per_span)) <= 1:
        return replace(sample, advantage=float(per_span[0]))
    lengths = [span.length for span in sample.spans]
    mean = float(np.average(np.asarray(per_span, dtype=np.float64), weights=lengths))
    return replace(sample, advantage=mean, metadata={**sample.metadata, SPAN_ADVANTAGES: [float(a) for a in per_span]})


def turn_order(rows: Iterable[Sample]) -> dict[str, list[str]]:
    """Turn ids by branch: rows by index, spans by place. The same however an episode is cut into rows.

    That is oldest first, but for an abandoned answer, which comes before the turns that went on without it.
    """
    order: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda r: r.index):
        order.setdefault(row.branch, []).extend(span.turn_id for span in row.spans)
    return order


def discounts(rows: Sequence[Sample], gamma: float) -> dict[str, float]:
    """gamma ** (later turns of the same branch), by turn id: the last turn of a branch counts in full."""
    return {
        turn_id: gamma ** (len(turns) - 1 - place)
        for turns in turn_order(rows).values()
        for place, turn_id in enumerate(turns)
    }


def returns_to_go(rows: Sequence[Sample], rewards: Mapping[str, float], gamma: float) -> dict[str, float]:
    """By turn id: its own reward plus gamma times what follows in its branch. Turns without a reward have 0."""
    returns: dict[str, float] = {}
    for turns in turn_order(rows).values():
        ahead = 0.0
        for turn_id in reversed(turns):
            ahead = rewards.get(turn_id, 0.0) + gamma * ahead
            returns[turn_id] = ahead
    return returns


def split_turns(samples: Iterable[Sample]) -> list[Sample]:
    """Rows whose spans differ in advantage, as one row per span: for trainers that carry one number a row.

    The context of each is what came before its span, masked. Costs a forward pass per turn; weights are per token, so
    the loss is the same.
    """
    split: list[Sample] = []
    counts: dict[str, int] = {}
    for sample in samples:
        per_span = sample.metadata.get(SPAN_ADVANTAGES)
        metadata = {k: v for k, v in sample.metadata.items() if k != SPAN_ADVANTAGES}
        pieces = (
            [sample]
            if per_span is None
            else [
                replace(only_spans(sample, (span,)), advantage=advantage, metadata=metadata)
                for span, advantage in zip(sample.spans, per_span, strict=True)
            ]
        )
        for piece in pieces:
            index = counts.get(sample.episode_id, 0)
            counts[sample.episode_id] = index + 1
            split.append(replace(piece, index=index))
    return split


def only_spans(sample: Sample, spans: Sequence[Span]) -> Sample:
    """The row up to the end of the last of `spans`, training only them. Everything else is context."""
    end = spans[-1].start + spans[-1].length
    keep = np.zeros(end, dtype=bool)
    for span in spans:
        keep[span.start : span.start + span.length] = True
    return replace(
        sample,
        tokens=sample.tokens[:end],
        loss_mask=np.where(keep, sample.loss_mask[:end], 0).astype(np.uint8),
        logprobs=np.where(keep, sample.logprobs[:end], 0).astype(np.float32),
        weight_versions=tuple(v if k else "" for v, k in zip(sample.weight_versions, keep.tolist(), strict=False)),
        spans=tuple(spans),
    )
