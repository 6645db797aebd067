"""What one session may use, and what the whole gateway admits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionLimits:
    """Upper bounds of one session; None is no bound. `wall_clock` in seconds since the session was opened.

    `tokens` counts sampled tokens. `concurrent` calls beyond it wait for their turn.
    """

    turns: int | None = None
    tokens: int | None = None
    wall_clock: float | None = None
    concurrent: int = 16


@dataclass(frozen=True)
class GatewayLimits:
    """`body_bytes` of one request, `sessions` open at once, seconds between keep-alives, and `grace`: how long
    after the prompt was rendered a failing engine can still be answered with a true HTTP status before the first
    event of a stream goes out."""

    body_bytes: int = 32 << 20
    sessions: int = 4096
    keepalive: float = 10.0
    grace: float = 1.0
    drain: float = 30.0
