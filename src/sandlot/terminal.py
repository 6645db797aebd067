"""Text of others on a terminal: what an agent, a model or a server wrote must not steer it."""

from __future__ import annotations

from rich.markup import escape

_KEPT = "\n\t"
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
_VISIBLE = {**_PICTURES, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def visible(text: str) -> str:
    """`text` with a picture in the place of each control character but new lines and tabs."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def literal(text: str) -> str:
    """`text` for rich markup: shown as it is, whatever it holds."""
    return escape(visible(text))
