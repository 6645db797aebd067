"""Keys and values of sequences: one growing buffer per sequence, and the prefix cache that keeps finished ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sandlot.engine.embedded.config import ModelConfig

Ids = NDArray[np.int32]
_STEP = 256
_TAKE_OVER = 32
"""A kept sequence that would lose at most this many tokens is taken over instead of copied."""
_MAX_KEPT = 512


class KvBuffer:
    """Keys and values of one sequence, `[layer, 2, kv_head, capacity, head_dim]`, and the ids they belong to."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self._config = config
        self.length = 0
        self.ids: Ids = np.empty(0, np.int32)
        self.data: NDArray[np.float32] = np.empty(0, np.float32)
        self._allocate(capacity)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def tokens(self) -> Ids:
        return self.ids[: self.length]

    def reserve(self, extra: int) -> None:
        """Make room for `extra` more tokens."""
        need = self.length + extra
        if need > len(self.ids):
            self._allocate(max(need, min(2 * self.length, self.length + 8 * _STEP)))

    def _allocate(self, capacity: int) -> None:
        c = self._config
        capacity = -(-capacity // _STEP) * _STEP
        data = np.empty((c.layers, 2, c.kv_heads, capacity, c.head_dim), np.float32)
        ids = np.empty(capacity, np.int32)
        if self.length:
            data[..., : self.length, :] = self.data[..., : self.length, :]
            ids[: self.length] = self.tokens
        self.data, self.ids = data, ids

    def append_ids(self, ids: Ids) -> int:
        """Extend the sequence by `ids`; the forward pass fills their keys and values. Returns where they start."""
        start = self.length
        self.reserve(len(ids))
        self.ids[start : start + len(ids)] = ids
        self.length = start + len(ids)
        return start

    def copy_prefix(self, length: int, capacity: int) -> KvBuffer:
        """A new buffer holding the first `length` tokens."""
        other = KvBuffer(self._config, max(capacity, length))
        other.data[..., :length, :] = self.data[..., :length, :]
        other.ids[:length] = self.ids[:length]
        other.length = length
        return other


class PrefixCache:
    """Finished sequences, least recently used first, within a budget of bytes."""

    def __init__(self, config: ModelConfig, budget_bytes: int) -> None:
        self._config = config
        self.budget_bytes = budget_bytes
        self._kept: OrderedDict[int, KvBuffer] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, prompt: Ids, running: Iterable[KvBuffer]) -> KvBuffer:
        """A buffer for a new sequence that holds the longest known prefix of `prompt`, but not all of it.

        The last prompt token is always left to compute, because its logits are what is sampled from.
        """
        best, length = None, 0
        for buffer in (*self._kept.values(), *running):
            n = common_prefix(buffer.tokens, prompt[:-1])
            if n > length:
                best, length = buffer, n
        capacity = len(prompt) + _STEP
        if best is None:
            return KvBuffer(self._config, capacity)
        kept = self._kept.get(id(best))
        if kept is not None:
            self._kept.move_to_end(id(best))
            if best.length - length <= _TAKE_OVER:
                self._drop(id(best))
                best.length = length
                return best
        return best.copy_prefix(length, capacity)

    def keep(self, buffer: KvBuffer) -> None:
        """Keep a finished sequence for later requests."""
        if buffer.length:
            self._kept[id(buffer)] = buffer
            self._kept_bytes += buffer.nbytes

    def shrink(self, running_bytes: int) -> None:
        """Forget the least recently used sequences until kept and running ones fit the budget."""
        while self._kept and (self._kept_bytes + running_bytes > self.budget_bytes or len(self._kept) > _MAX_KEPT):
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    def _drop(self, key: int) -> None:
        self._kept_bytes -= self._kept.pop(key).nbytes


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
