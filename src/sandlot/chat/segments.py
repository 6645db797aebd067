"""Ids of stretches of text between control tokens, kept by content: prompts have most of them in common."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence

_CAP = 32 << 20
"""About how many bytes a generation holds; there are two."""


class Segments:
    """Encodes stretches, each once while it is remembered. Thread-safe.

    What was not asked for during a whole generation is forgotten.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def ids(self, stretches: Sequence[str]) -> list[array[int]]:
        """Ids of each stretch."""
        young, old = self._young, self._old
        found = {text: ids for text in stretches if (ids := young.get(text, old.get(text))) is not None}
        if missing := list(dict.fromkeys(text for text in stretches if text not in found)):
            found.update(zip(missing, (array("i", ids) for ids in self._encode(missing)), strict=True))
        with self._lock:
            for text, ids in found.items():
                if text not in self._young:
                    self._young[text] = ids
                    self._size += 2 * len(text) + 4 * len(ids) + 200
            if self._size > _CAP:
                self._old, self._young, self._size = self._young, {}, 0
        return [found[text] for text in stretches]
