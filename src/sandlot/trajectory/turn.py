"""A turn: one accepted call of the engine, as it is journaled and trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sandlot.ids import Ids

if TYPE_CHECKING:
    from _hashlib import HASH as IdsHash


def ids_sha256(ids: Ids) -> str:
    """Hex SHA-256 over the little-endian int32 bytes of token ids: how a prompt is proven without storing it twice."""
    return ids_hash(ids).hexdigest()


def ids_hash(ids: Ids, begun: IdsHash | None = None) -> IdsHash:
    """The same before it is written out, of `ids` alone or after those that `begun` stands for, which it leaves be."""
    hasher = sha256() if begun is None else begun.copy()
    hasher.update(np.ascontiguousarray(ids, dtype="<i4").data)
    return hasher


@dataclass(frozen=True, eq=False)
class Turn:
    """One call of the engine that was accepted.

    The prompt is stored as a delta: the first `shared` tokens of the full sequence (prompt + output) of turn
    `parent`, then `new_ids`. A root has `parent` None and `shared` 0. `prompt_sha256` was taken over the exact ids
    that were sent, before they were split, so the delta can be proven.

    `logprobs[i]` belongs to `output_ids[i]` (float64, natural log). `versions` are (weight version, start, end)
    spans that tile the output. `branch` says whose conversation this is (`main`, `subagent:<id>`, `side`), `fork`
    why it did not continue an earlier turn (empty for the first of a session and for continuations), `parse` the
    status of each tool call found in it.
    """

    id: str
    parent: str | None
    shared: int
    new_ids: Ids
    output_ids: Ids
    logprobs: npt.NDArray[np.float64]
    finish_reason: str
    prompt_sha256: str
    prompt_length: int
    versions: tuple[tuple[str, int, int], ...]
    sampling: Mapping[str, Any]
    logprobs_mode: str
    model: str
    created: float
    request_sha256: str = ""
    branch: str = "main"
    fork: str = ""
    parse: tuple[str, ...] = ()
    delivered: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return self.prompt_length + len(self.output_ids)
