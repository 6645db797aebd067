"""What one session may use, and what the whole gateway admits."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SessionLimits:
    """Upper bounds of one session; None is no bound.

    `wall_clock` in seconds since the session was opened, or its `clock` began again; it stands still, for as long again
    at most, while the engine's side is paused or fails.
    `tokens` counts sampled tokens; a call waits while others in flight may still need those that are left.
    `concurrent` calls beyond it wait for their turn, up to 16 times as many. `body_bytes` of one request lowers the
    gateway's own bound.
    """

    turns: int | None = None
    tokens: int | None = None
    wall_clock: float | None = None
    concurrent: int = 16
    body_bytes: int | None = None


@dataclass(frozen=True)
class GatewayLimits:
    """What the gateway admits and how long it waits, in seconds.

    `body_bytes` of one request, `reading_bytes` of all requests until they are prompts (above it one is refused as
    overloaded), `engine_tokens` of all prompts at the engine (above it calls wait; None is no bound), `sessions` open
    at once. Beyond `connections` of agents the oldest without a request end. `keepalive` between no-op events of a
    stream. `grace` is how long after the prompt was rendered a failing engine is still answered with a true HTTP
    status, before a stream begins. A passing failure of the engine is tried again after each of `engine_retry_delays`.
    `drain` bounds the wait for calls in flight when a session is sealed.
    """

    body_bytes: int = 32 << 20
    reading_bytes: int = 1 << 30
    engine_tokens: int | None = None
    sessions: int = 4096
    connections: int = 16384
    keepalive: float = 10.0
    grace: float = 1.0
    engine_retry_delays: tuple[float, ...] = (0.5, 2.0, 8.0)
    drain: float = 30.0

    def shared_by(self, processes: int) -> GatewayLimits:
        """The part of one of several processes: bytes and tokens are divided, sessions are counted elsewhere."""
        tokens = self.engine_tokens
        return replace(
            self,
            reading_bytes=max(self.body_bytes, self.reading_bytes // processes),
            engine_tokens=None if tokens is None else max(1, tokens // processes),
        )
