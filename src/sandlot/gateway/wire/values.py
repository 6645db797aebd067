"""How much a request may hold besides text: each value of JSON takes many times its bytes, and no other session has its
turn while a text is decoded."""

from __future__ import annotations

from sandlot.gateway.wire.base import WireError

MOST = 300_000
"""Values of one body. A million tokens of very short calls hold half of that."""
MOST_TOGETHER = 100_000
"""Values of one message, tool or other field, and in the arguments of one call, which are JSON within JSON."""
MOST_MARKS = 1_000_000
"""What looks like values in the texts of one body. A million tokens of code hold a fifth of that."""
MOST_MESSAGES = 30_000
"""Messages and tools of one request."""
_BARE = 16
"""Bytes outside of strings for each value, or digits would take as long."""
_PIECE = 1 << 18
"""Bytes that are looked at in one go."""


def marks(text: bytes) -> int:
    """How many values a text may hold: its separators and openings, those within strings and escaped ones too."""
    if len(text) <= _PIECE:
        return _marks(text)
    return sum(_marks(text[at : at + _PIECE]) for at in range(0, len(text), _PIECE))


def check_body(text: bytes) -> None:
    """Refuse a body of so many values that no agent's history is known to have."""
    if marks(text) > MOST_MARKS or not _within(text, MOST):
        raise WireError(
            "too_large",
            f"the request holds more than {MOST} JSON values, or its texts more than {MOST_MARKS} marks of JSON; "
            "send less structure and more text",
        )


def check_together(text: bytes | str) -> None:
    """Refuse what is decoded in one go and holds so many values as no model and no tool writes."""
    if len(text) <= MOST_TOGETHER:
        return
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if not _within(raw, MOST_TOGETHER):
        raise WireError(
            "too_large",
            f"one message, tool or call holds more than {MOST_TOGETHER} JSON values; send less structure and more text",
        )


def check_messages(count: int) -> None:
    """Refuse so many messages and tools as no context holds."""
    if count > MOST_MESSAGES:
        raise WireError(
            "too_large", f"the request has {count} messages and tools, more than {MOST_MESSAGES}; send fewer"
        )


def _marks(text: bytes) -> int:
    return len(text) - len(text.translate(None, b",[{")) + text.count(b"\\u00")


def _within(text: bytes, most: int) -> bool:
    """Whether a text holds so many values at most, told by what stands in no string."""
    at = inside = bare = found = 0
    while at < len(text):
        piece = text[at : at + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece += text[at + _PIECE : at + _PIECE + 1]  # the other half of an escape
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
        bare += len(outside)
        found += _marks(outside)
        if found > most or bare > _BARE * most:
            return False
    return True
