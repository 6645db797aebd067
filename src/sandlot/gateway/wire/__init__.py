"""Wire protocols: one file per dialect that an agent speaks, and one line here."""

from __future__ import annotations

from sandlot.gateway.wire.anthropic import AnthropicWire
from sandlot.gateway.wire.base import Answer, ChatRequest, ErrorKind, Head, Wire, WireError
from sandlot.gateway.wire.openai_chat import ChatWire

WIRES: tuple[Wire, ...] = (
    AnthropicWire(),
    ChatWire(),
)

_BY_PATH: dict[str, Wire] = {path: wire for wire in WIRES for path in wire.paths}


def wire_for(path: str) -> Wire:
    """The wire spoken at a path (without the query). `KeyError` where none is spoken."""
    return _BY_PATH[path]


__all__ = ["WIRES", "Answer", "ChatRequest", "ErrorKind", "Head", "Wire", "WireError", "wire_for"]
