"""A sample: one root-to-leaf path of a session's token tree, as a training row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sandlot.ids import Ids


class Span(NamedTuple):
    """`length` trained tokens at `start` of the sample are `output_ids[offset:offset + length]` of turn `turn_id`."""

    start: int
    turn_id: str
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class Sample:
    """One training row. Every per-token field has length `len(tokens)` and is aligned to the token, not shifted.

    tokens           int32 [L]   prompt and everything after it
    loss_mask        uint8 [L]   1 where the token is trained here
    logprobs         float32 [L] of the sampled token where `loss_mask` is 1, else 0 (never read there)
    weight_versions  list[str] [L] version that sampled the token, "" off the mask
    spans            where each trained stretch came from, in order of `start`
    prompt_length    tokens before the first sampled token of the path
    reward           float in [0, 1], or None when ungraded
    advantage        set by `sandlot.train.credit`, else None
    loss_weight      weight of each trained token of this row in the loss
    status           "completed", "truncated" (the last turn hit a limit)
    """

    episode_id: str
    group_id: str
    index: int
    branch: str
    tokens: Ids
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    weight_versions: tuple[str, ...]
    spans: tuple[Span, ...]
    prompt_length: int
    reward: float | None = None
    advantage: float | None = None
    loss_weight: float = 1.0
    status: str = "completed"
    metadata: Mapping[str, Any] = field(default_factory=dict)
