"""Prompt ids as they are sent: an array of numbers that keeps its own JSON text."""

from __future__ import annotations

from array import array as packed
from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int32]


class PromptIds(Sequence[int]):
    """A sequence of token ids for an engine. What is longer by some ids is spelt from what was spelt before.

    The JSON text of a long prompt costs as much as all else in its turn, and most of it was sent the turn before.
    """

    __slots__ = ("array", "spelt")

    def __init__(self, array: Array, spelt: tuple[bytes, ...] | None = None) -> None:
        self.array = array
        self.spelt = _spelt(array.tolist()) if spelt is None else spelt
        """The ids in JSON without the brackets around them, in pieces that stand one after the other."""

    @classmethod
    def of(cls, ids: list[int]) -> PromptIds:
        """The same of a plain list."""
        return cls(np.frombuffer(packed("i", ids), np.int32) if ids else np.empty(0, np.int32), _spelt(ids))

    def followed_by(self, *more: Array) -> PromptIds:
        """These ids and then those."""
        spelt = self.spelt
        for ids in more:
            spelt += _spelt(ids.tolist(), b"," if spelt else b"")
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


def _spelt(ids: list[int], before: bytes = b"") -> tuple[bytes, ...]:
    return (before + msgspec.json.encode(ids)[1:-1],) if ids else ()


def with_ids(body: dict[str, Any], field: str, ids: Sequence[int]) -> bytes:
    """A request body in JSON, the ids in its last field."""
    spelt = ids.spelt if isinstance(ids, PromptIds) else (msgspec.json.encode(list(ids))[1:-1],)
    head = msgspec.json.encode(body)[:-1]
    return b"".join([head, b"," if body else b"", msgspec.json.encode(field), b":[", *spelt, b"]}"])
