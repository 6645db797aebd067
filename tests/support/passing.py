"""Has time pass for a session without waiting for it."""

from __future__ import annotations

from sandlot.gateway.clock import Clock


def passes(clock: Clock, seconds: float) -> None:
    """So much later, with everything as it is now."""
    clock._began -= seconds
    clock._went -= seconds
    if clock._since is not None:
        clock._since -= seconds
    clock._set()
