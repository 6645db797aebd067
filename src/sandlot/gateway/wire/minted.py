"""What the gateway mints into an answer, so that the turn is known when it comes back: each mark names its turn."""

from __future__ import annotations

import base64
import re

_TURN = r"[0-9a-f]{20}"
_ID = re.compile(rf"[a-z]+_({_TURN})(?:_\d+)?")
_SIGNED = re.compile(rf"sandlot:({_TURN})".encode())


def call_id(prefix: str, turn_id: str, number: int) -> str:
    """The id of a turn's call."""
    return f"{prefix}{turn_id}_{number}"


def signature(turn_id: str) -> str:
    """The mark of a turn, where a protocol has room for an opaque text."""
    return base64.b64encode(f"sandlot:{turn_id}".encode()).decode()


def turn_of(mark: str) -> str:
    """The turn that a mark, or an id of an item, names; empty where it is not the gateway's."""
    if found := _ID.fullmatch(mark):
        return found[1]
    try:
        signed = _SIGNED.fullmatch(base64.b64decode(mark, validate=True))
    except ValueError:
        return ""
    return signed[1].decode() if signed else ""
