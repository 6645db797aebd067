"""Decoding of request bodies: a session sends its history again with every turn, so what came before is not decoded."""

from __future__ import annotations

import asyncio
import codecs
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from sandlot.gateway.admission import Budget
from sandlot.gateway.wire import values
from sandlot.gateway.wire.transcript import History, Item

_CAP = 32 << 20
"""Bytes of elements that are remembered; beyond that everything is forgotten and the next turn costs more."""
_LAST_TOOLS = 4 << 20
"""Bytes of tools that are remembered as they came last."""
_WHOLE = 64 << 20
"""Bytes of bodies that are remembered whole."""
_ELEMENT = 500
"""Bytes that an element takes besides its text, so that a great many small ones are not remembered either."""
_VALUE = 60
"""Bytes that each value in it takes."""
_ARRIVING = 32 << 20
"""Bytes of requests that may be on their way at once; others wait, and a larger one comes alone."""
_BRANCHES = 3
"""How many bodies are remembered whole: those of an agent and of its sub-agents come in turn."""
_SMALL = 200_000
_PIECE = 1 << 20
"""Bytes that are decoded at a time, so that others have their turn between."""
_HISTORIES = frozenset({"messages", "input", "contents"})
_REMEMBERED = _HISTORIES | {"tools", "functions"}
_BLANK = b" \t\r\n"

_halves = re.compile(
    rb"\\(?:\\(?:\\\\)*|u[dD](?:[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>[89a-fA-F][0-9a-fA-F]{2})))"
)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_anything = msgspec.json.Decoder(Any)


@dataclass(eq=False)
class _Begun:
    """How a body began: `head` ends with the last but one element of its history, whose first stands at `start`.

    `weight`: bytes that those elements take besides it."""

    head: bytes
    start: int
    field: str
    history: History
    weight: int


class _Items:
    """Elements by their text, up to `_CAP` bytes of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[bytes, Item]] = {}
        self._size = 0

    def of(self, key: tuple[str, str]) -> dict[bytes, Item]:
        """Those of one field of one protocol."""
        if self._size > _CAP:
            self._known.clear()
            self._size = 0
        return self._known.setdefault(key, {})

    def keep(self, known: dict[bytes, Item], text: bytes, item: Item) -> None:
        """Put an element in, if there is room."""
        self._size += len(text) + item.weight
        if self._size <= _CAP:
            known[text] = item


_shared = _Items()
"""Tools, which sessions have in common."""


class Bodies:
    """Decodes the bodies of one session. Elements of top-level lists (messages, tools) that came with the same bytes
    before are the same `Item` again; a body that begins as one before did is decoded from there on."""

    def __init__(self) -> None:
        self._items = _Items()
        self._begun: dict[str, list[_Begun]] = {}
        self._tools: dict[tuple[str, str], tuple[bytes, History]] = {}  # as they came last, which is nearly always
        self.arriving = Budget(_ARRIVING)
        self.lock = asyncio.Lock()
        """Held while a body is read: one at a time, be it in a thread."""

    def quick(self, raw: bytes, wire: str) -> bool:
        """Whether decoding takes a moment only: the body is small, or goes on from one that is known."""
        known = self._known(raw, wire)
        return len(raw) - (len(known.head) if known else 0) <= _SMALL

    def _known(self, raw: bytes, wire: str) -> _Begun | None:
        """The longest beginning of an earlier body that this one has."""
        begun = self._begun.get(wire, ())
        return max((b for b in begun if raw.startswith(b.head)), key=lambda b: len(b.head), default=None)

    def decode(self, raw: bytes, wire: str) -> Any:
        """The JSON value of a body in the protocol `wire`. Raises what `msgspec.json.decode` raises, and `WireError`
        where it holds too many values.

        Halves of characters, as clients leave them where they cut a text, are U+FFFD.
        """
        try:
            return self._decode(raw, wire)
        except (msgspec.DecodeError, UnicodeDecodeError):
            whole = _without_halves(raw)
            if whole == raw:
                raise
            return self._decode(whole, wire)

    def _decode(self, raw: bytes, wire: str) -> Any:
        begun = self._begun.setdefault(wire, [])
        known = self._known(raw, wire)
        if known is not None and (body := self._continued(raw, known, wire)) is not None:
            begun.remove(known)
            new = _further(raw, body, known)
        else:
            if len(raw) > _SMALL:
                values.check_body(raw)
            try:
                fields = _fields.decode(raw)
            except msgspec.ValidationError:
                return _decoded(raw)  # no object: for the wire to refuse
            texts = {name: bytes(value) for name, value in fields.items()}
            body = {name: self._value(text, (wire, name)) for name, text in texts.items()}
            new = next((found for f in _HISTORIES & body.keys() if (found := _begun(raw, texts[f], body, f))), None)
        if new is not None:
            begun.insert(0, new)
            while len(begun) > _BRANCHES or sum(one.weight + len(one.head) for one in begun) > _WHOLE:
                begun.pop()
        return body

    def _continued(self, raw: bytes, known: _Begun, wire: str) -> dict[str, Any] | None:
        """The body, its known elements left out of the text that is decoded. None where that cannot be done."""
        rest = raw[len(known.head) :].lstrip(_BLANK)
        if rest[:1] != b",":
            return None
        rest = rest[1:].lstrip(_BLANK)
        if rest[:1] == b"]":
            return None  # a comma too many
        short = raw[: known.start] + rest
        if len(short) > _SMALL:
            values.check_body(short)
        texts = {name: bytes(value) for name, value in _fields.decode(short).items()}
        if not short.startswith(texts[known.field], known.start - 1):
            return None  # the field comes twice
        body = {name: self._value(text, (wire, name)) for name, text in texts.items()}
        shared = len(known.history) - 1
        history = History([*known.history[:shared], *body[known.field]])
        history.before, history.shared = known.history, shared
        known.history.before = None
        body[known.field] = history
        return body

    def _value(self, raw: bytes, key: tuple[str, str]) -> Any:
        if raw[:1] != b"[" or key[1] not in _REMEMBERED:
            return _decoded(raw)
        if key[1] in _HISTORIES:
            return self._list(raw, self._items, key)
        last = self._tools.get(key)
        if last is None or last[0] != raw:
            last = (raw, self._list(raw, _shared, key))
            if len(raw) <= _LAST_TOOLS:
                self._tools[key] = last
        return last[1]

    def _list(self, raw: bytes, items: _Items, key: tuple[str, str]) -> History:
        known = items.of(key)
        found = History()
        for element in _elements.decode(raw):
            text = bytes(element)
            if (item := known.get(text)) is None:
                value = _decoded(text)
                if type(value) is not dict:
                    found.append(value)
                    continue
                item = Item(value)
                item.size = len(text)
                item.weight = _ELEMENT + _VALUE * values.marks(text)
                items.keep(known, text, item)
            found.append(item)
        return found


def _decoded(text: bytes) -> Any:
    values.check_together(text)
    return _anything.decode(text)


def _without_halves(raw: bytes) -> bytes:
    """A JSON text in which every escape and every byte is, or is part of, a whole character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = (raw[at : at + _PIECE] for at in range(0, len(raw), _PIECE))
    whole = bytearray().join(decoder.decode(piece).encode() for piece in pieces) + decoder.decode(b"", True).encode()
    for found in _halves.finditer(bytes(whole)):
        if found["half"]:
            whole[found.start() : found.end()] = b"\\ufffd"
    return bytes(whole)


def _begun(raw: bytes, text: bytes, body: dict[str, Any], field: str) -> _Begun | None:
    """How a body began whose history is `text`."""
    name = b'"%b"' % field.encode()
    if (at := raw.find(name)) < 0:
        return None
    at += len(name)
    while raw[at] in _BLANK or raw[at] == ord(":"):
        at += 1
    history = body[field]
    if not isinstance(history, History) or not raw.startswith(text, at):
        return None  # the name stands elsewhere as well
    return _up_to(raw, _Begun(raw[: at + 1], at + 1, field, History(), 0), history, 0)


def _further(raw: bytes, body: dict[str, Any], known: _Begun) -> _Begun | None:
    """How a body began that began as a known one does."""
    history: History = body[known.field]
    return _up_to(raw, known, history, history.shared)


def _up_to(raw: bytes, known: _Begun, history: History, index: int) -> _Begun | None:
    """A body up to the last but one element of its history, whose element `index` follows what is known of it."""
    if len(history) < 2:
        return None
    at, weight = len(known.head), known.weight
    for item in history[index:-1]:
        while raw[at] in _BLANK or raw[at] == ord(","):
            at += 1
        if not isinstance(item, Item):
            return None
        at += item.size
        weight += item.weight
    return _Begun(raw[:at], known.start, known.field, history, weight) if at + weight <= _CAP else None
