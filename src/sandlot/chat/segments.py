"""Ids of stretches of text between control tokens, kept by content: prompts have most of them in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sandlot.ids import Piece

_CAP = 32 << 20
"""About how many bytes a generation holds; there are two."""


class Segments:
    """Encodes stretches, each once while it is remembered. Thread-safe.

    What was not asked for during a whole generation is forgotten.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._young: dict[str, Piece] = {}
        self._old: dict[str, Piece] = {}
        self._size = 0
        self._lock = threading.Lock()

    def pieces(self, stretches: Sequence[str]) -> list[Piece]:
        """The ids of each stretch."""
        young, old = self._young, self._old
        absent = dict.fromkeys(text for text in stretches if text not in young)
        taken = {text: piece for text in absent if (piece := old.get(text)) is not None}
        if missing := [text for text in absent if text not in taken]:
            taken.update(zip(missing, map(Piece, self._encode(missing)), strict=True))
        with self._lock:
            for text, piece in taken.items():
                self._young[text] = piece
                self._size += 2 * len(text) + 10 * len(piece.ids) + 400
            if self._size > _CAP:
                self._old, self._young, self._size = self._young, {}, 0
        return [taken[text] if text in taken else young[text] for text in stretches]
