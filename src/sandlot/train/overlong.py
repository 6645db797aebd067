"""Rows that are too long for a trainer: cut at whole turns, never inside one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sandlot.train.turns import SPAN_ADVANTAGES, only_spans
from sandlot.trajectory.sample import Sample


def cut_overlong(samples: Iterable[Sample], max_tokens: int) -> list[Sample]:
    """Rows of at most `max_tokens` tokens: later turns that do not fit are left out whole.

    A cut row has the status `truncated` and `cut` in its metadata. A row whose first trained turn does not fit has
    nothing to train and is gone; its episode still counts in the baseline of its group if its outcome is told. Rows
    that are credited already keep their weights, so cut before giving credit.
    """
    kept: list[Sample] = []
    for sample in samples:
        if len(sample.tokens) <= max_tokens:
            kept.append(sample)
            continue
        fitting = [span for span in sample.spans if span.start + span.length <= max_tokens]
        if not fitting:
            continue
        metadata = {**sample.metadata, "cut": True}
        if SPAN_ADVANTAGES in metadata:
            metadata[SPAN_ADVANTAGES] = list(metadata[SPAN_ADVANTAGES][: len(fitting)])
        kept.append(replace(only_spans(sample, fitting), status="truncated", metadata=metadata))
    return kept
