"""Wire protocols: one file per dialect that an agent speaks, and one line here."""

from __future__ import annotations

import re

from sandlot.gateway.wire.anthropic import AnthropicWire
from sandlot.gateway.wire.base import Answer, ChatRequest, ErrorKind, Head, Wire, WireError
from sandlot.gateway.wire.google import GoogleWire
from sandlot.gateway.wire.openai_chat import ChatWire
from sandlot.gateway.wire.responses import ResponsesWire

WIRES: tuple[Wire, ...] = (
    AnthropicWire(),
    ChatWire(),
    ResponsesWire(),
    GoogleWire(),
)

_BY_PATH: list[tuple[re.Pattern[str], Wire]] = [
    (re.compile(".+".join(map(re.escape, re.split(r"\{\w+\}", path)))), wire) for wire in WIRES for path in wire.paths
]


def wire_for(path: str) -> Wire:
    """The wire spoken at a path (without the query). `KeyError` where none is spoken."""
    for pattern, wire in _BY_PATH:
        if pattern.fullmatch(path):
            return wire
    raise KeyError(path)


__all__ = ["WIRES", "Answer", "ChatRequest", "ErrorKind", "Head", "Wire", "WireError", "wire_for"]
