"""Token ids as they are kept, and prompts as they are sent: numbers that keep their own JSON text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""A one-dimensional array of token ids."""


def ids_array(ids: Any) -> Ids:
    """A one-dimensional int32 array of token ids."""
    if type(ids) is list and ids:  # three times as fast as numpy's own way
        return np.frombuffer(array("i", ids), dtype=np.int32)
    return np.asarray(ids, dtype=np.int32).reshape(-1)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading tokens two arrays have in common; cheap where they differ early."""
    n, at, step = min(len(a), len(b)), 0, 64
    while at < n:
        stop = min(n, at + step)
        differs = a[at:stop] != b[at:stop]
        if differs.any():
            return at + int(differs.argmax())
        at, step = stop, step * 4
    return n


class Piece:
    """Ids that come again in many prompts, with their JSON text as soon as it is asked for."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = array("i", ids)

    @cached_property
    def spelt(self) -> bytes:
        """The ids in JSON without the brackets around them."""
        return _spelt(self.ids.tolist())


class PromptIds(Sequence[int]):
    """A sequence of token ids for an engine. What is longer by some ids is spelt from what was spelt before.

    The JSON text of a long prompt costs as much as all else in its turn, and most of it was sent the turn before.
    """

    __slots__ = ("array", "spelt")

    def __init__(self, array: Ids, spelt: tuple[bytes, ...] | None = None) -> None:
        self.array = array
        self.spelt = (_spelt(array.tolist()),) if spelt is None else spelt
        """The ids in JSON without the brackets around them, in stretches that stand one after the other."""

    @classmethod
    def of(cls, ids: Sequence[int]) -> PromptIds:
        """The same of any ids."""
        return ids if isinstance(ids, PromptIds) else cls(ids_array(ids), (_spelt(list(ids)),))

    @classmethod
    def joined(cls, pieces: Iterable[Piece]) -> PromptIds:
        """Pieces one after the other."""
        filled = [piece for piece in pieces if piece.ids]
        ids = np.frombuffer(b"".join([piece.ids for piece in filled]), np.int32)
        return cls(ids, (b",".join([piece.spelt for piece in filled]),))

    def followed_by(self, *more: Ids) -> PromptIds:
        """These ids and then those."""
        spelt = self.spelt if len(self) else ()
        for ids in more:
            if len(ids):
                spelt += ((b"," if spelt else b"") + _spelt(ids.tolist()),)
        return PromptIds(np.concatenate([self.array, *more]), spelt)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        found: int | list[int] = self.array[at].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and bool(self.array.tolist() == list(other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptIds({len(self)} ids)"


def _spelt(ids: list[int]) -> bytes:
    return msgspec.json.encode(ids)[1:-1]
