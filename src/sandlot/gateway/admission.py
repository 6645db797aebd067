"""Bounds on what all sessions together may hold: bytes of requests being read, tokens of prompts at the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext

from sandlot.errors import ConfigError
from sandlot.gateway.wire import WireError

Held = Callable[[], AbstractContextManager[None]]
"""What is entered around a wait."""


def check_room(session_id: str, sessions: Collection[str], limit: int) -> None:
    """Raise `ConfigError` when a session of that id, or one more at all, cannot be opened."""
    if session_id in sessions:
        raise ConfigError(f"a session called {session_id!r} exists already; finish and delete it, or choose another id")
    if len(sessions) >= limit:
        raise ConfigError(f"the gateway has {limit} sessions open; finish and delete some first")


class Budget:
    """An amount handed out in parts and given back. None is no bound. Lives on one event loop.

    A part larger than the whole is admitted alone, so that nothing waits for ever.
    """

    def __init__(self, whole: int | None) -> None:
        self.whole = whole
        self.used = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def _fits(self, part: int) -> bool:
        return self.whole is None or self.used == 0 or self.used + part <= self.whole

    @contextmanager
    def now(self, part: int, what: str) -> Iterator[None]:
        """Hold `part`, or refuse with a retryable `WireError` when it does not fit now."""
        if not self._fits(part):
            raise WireError(
                "overloaded", f"overloaded: the gateway holds {self.used} of {self.whole} {what}; try again"
            )
        self.used += part
        try:
            yield
        finally:
            self._give(part)

    @asynccontextmanager
    async def wait(self, part: int, held: Held = nullcontext) -> AsyncIterator[None]:
        """Hold `part` as soon as it fits, first come first served; `held` is entered where that takes time."""
        if self._queue or not self._fits(part):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append((part, turn))
            try:
                with held():
                    await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give(part)  # it was granted in the moment its waiter left
                else:
                    self._grant()  # it may have been the first, and stood in the way
                raise
        else:
            self.used += part
        try:
            yield
        finally:
            self._give(part)

    def _give(self, part: int) -> None:
        self.used -= part
        self._grant()

    def _grant(self) -> None:
        while self._queue and (self._queue[0][1].cancelled() or self._fits(self._queue[0][0])):
            part, turn = self._queue.popleft()
            if not turn.cancelled():  # else its waiter has left, or is about to
                self.used += part
                turn.set_result(None)
