"""Finding control-token strings in text, and cutting them where the text is not to be trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_MARKERS = tuple(chr(c) for c in range(0x102A0, 0x102D1))
"""Carian letters: printable, so that `repr`, JSON and `trim` in a template leave them alone."""


_REMEMBERED = 8_000
"""Texts that are remembered, and characters of the longest of them."""


def literals_pattern(literals: Iterable[str]) -> str:
    """Regex source that matches the longest of `literals` at a position; a trie, so thousands of them stay cheap."""
    root: dict[str, Any] = {}
    for literal in literals:
        node = root
        for char in literal:
            node = node.setdefault(char, {})
        node[""] = {}
    return _trie_source(root) if root else r"(?!)"


def _trie_source(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        (char, node), *_ = node.items()
        run += re.escape(char)
    branches = [re.escape(char) + _trie_source(child) for char, child in node.items() if char]
    if not branches:
        return run
    return run + "(?:" + "|".join(branches) + ")" + ("?" if "" in node else "")


class Literals:
    """The control-token strings of one vocabulary."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.all = frozenset(literals)
        source = literals_pattern(sorted(self.all))
        self.longest = re.compile(source)
        self._parts = re.compile(f"({source})")
        self._starts = re.compile(f"(?={source})")
        self._heads = frozenset(s[:k] for s in self.all for k in range(1, len(s)))
        self._tails = frozenset(s[k:] for s in self.all for k in range(1, len(s)))
        self._reach = max(map(len, self.all), default=0)
        self._first = frozenset(s[0] for s in self.all)
        self._last = frozenset(s[-1] for s in self.all)
        self._all_joined = "\0".join(self.all)
        self._known_harmless = lru_cache(maxsize=_REMEMBERED)(self._harmless)

    def split(self, text: str) -> tuple[list[str], list[str]]:
        """The literals in a text, longest first, and the stretches before, between and after them."""
        parts = self._parts.split(text)
        return parts[::2], parts[1::2]

    def harmless(self, text: str) -> bool:
        """Whether there is nothing to cut in `text`. Most come again whenever their history was rewritten."""
        return self._known_harmless(text) if len(text) <= _REMEMBERED else self._harmless(text)

    def _harmless(self, text: str) -> bool:
        return not self.cuts(text) and not self.holds(text)

    def cuts(self, text: str) -> list[int]:
        """Where a marker must go so that no literal in `text`, or across one of its edges, can be recognised."""
        cuts: set[int] = set()
        if self.longest.search(text):  # far quicker than the overlapping search, and nearly always the end of it
            cuts.update(m.start() + 1 for m in self._starts.finditer(text))
        body = text.strip()
        reach = min(self._reach, len(body) + 1)
        if not self._first.isdisjoint(body[-reach:]) and any(body[-k:] in self._heads for k in range(1, reach)):
            cuts.add(len(text.rstrip()))
        if not self._last.isdisjoint(body[:reach]) and any(body[:k] in self._tails for k in range(1, reach)):
            cuts.add(len(text) - len(text.lstrip()))
        return sorted(cuts)

    def holds(self, text: str) -> bool:
        """Whether `text`, trimmed, is a piece of a literal."""
        body = text.strip()
        return 0 < len(body) <= self._reach and body in self._all_joined


class Guard:
    """Makes one conversation safe to render: puts a marker into every control string of untrusted text.

    The marker is a character that occurs nowhere in the conversation. It survives the template and is taken out
    by `clean` after the template's own control strings were recognised.
    """

    def __init__(self, literals: Literals, texts: Iterable[str]) -> None:
        self._literals = literals
        self.marker = ""
        texts = list(texts)
        if not all(map(literals.harmless, texts)):
            self.marker = next((m for m in _MARKERS if not any(m in t or _escaped(m) in t for t in texts)), "")
            if not self.marker:
                self.marker = _free_character(texts)

    def text(self, text: str) -> str:
        """`text` with the marker inside every control string."""
        if not self.marker:
            return text
        parts, last = [], 0
        for cut in self._literals.cuts(text):
            parts.append(text[last:cut])
            last = cut
        return self.marker.join([*parts, text[last:]])

    def content(self, text: str) -> str:
        """The same for a whole text of a message, also where it is itself only a piece of a control string.

        Names and schema words are not treated so: templates compare them, and `python` is a piece of `<|python_tag|>`.
        """
        return (self.marker if self.marker and self._literals.holds(text) else "") + self.text(text)

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it, keys too, made safe."""
        if not self.marker:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(v) for v in value]
        return value

    def clean(self, text: str) -> str:
        """`text` without the markers, also where the template wrote them as an ASCII escape."""
        return text.replace(self.marker, "").replace(_escaped(self.marker), "") if self.marker else text


def strings_in(value: Any) -> list[str]:
    """All strings in a JSON value, keys too."""
    found, todo = [], [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            found.extend(item)
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)
    return found


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]


def _free_character(texts: list[str]) -> str:
    used = set().union(*map(set, texts))
    return next(
        c for c in map(chr, range(0x20000, 0x2A6D0)) if c not in used and not any(_escaped(c) in t for t in texts)
    )
