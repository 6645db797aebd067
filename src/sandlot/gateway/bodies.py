"""Decoding of request bodies: a session sends its history again with every turn, so what came before is not decoded."""

from __future__ import annotations

from typing import Any

import msgspec

from sandlot.gateway.wire.transcript import Item

_CAP = 32 << 20
"""Bytes of elements that are remembered; beyond that everything is forgotten and the next turn costs more."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_anything = msgspec.json.Decoder(Any)


class Bodies:
    """Decodes the bodies of one session. Elements of top-level lists (messages, tools) that came with the same bytes
    before are the same `Item` again."""

    def __init__(self) -> None:
        self._items: dict[tuple[str, str], dict[bytes, Item]] = {}
        self._size = 0

    def decode(self, raw: bytes, wire: str) -> Any:
        """The JSON value of a body in the protocol `wire`. Raises what `msgspec.json.decode` raises."""
        try:
            fields = _fields.decode(raw)
        except msgspec.ValidationError:
            return _anything.decode(raw)  # no object: for the wire to refuse
        return {name: self._value(bytes(value), (wire, name)) for name, value in fields.items()}

    def _value(self, raw: bytes, key: tuple[str, str]) -> Any:
        if raw[:1] != b"[":
            return _anything.decode(raw)
        if self._size > _CAP:
            self._items.clear()
            self._size = 0
        known = self._items.setdefault(key, {})
        found: list[Any] = []
        for element in _elements.decode(raw):
            text = bytes(element)
            if (item := known.get(text)) is None:
                value = _anything.decode(text)
                if type(value) is not dict:
                    found.append(value)
                    continue
                item = known[text] = Item(value)
                self._size += len(text)
            found.append(item)
        return found
