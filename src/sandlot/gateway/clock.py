"""The time that a session's agent has had: it stands still while the engine's side does not serve it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


class OutOfTimeError(Exception):
    """The agent's time is over."""


class Clock:
    """Runs for `limit` seconds (None: for ever). Lives on one event loop.

    It stands while a call is held back, and from the beginning of a call that the engine failed to the next answer:
    for another `limit` at most in all, so that everything ends.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._held = 0
        self._failing = False
        self._waiting: dict[asyncio.Timeout, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.begin()

    def begin(self) -> None:
        """Start anew."""
        self._began = self._went = time.monotonic()
        self._stood = 0.0
        self._since: float | None = None
        self._set()

    @property
    def standing(self) -> bool:
        """Whether it stands now."""
        return self._since is not None

    @property
    def stood(self) -> float:
        """Seconds in which it stood."""
        return self._stood + (0.0 if self._since is None else time.monotonic() - self._since)

    @property
    def left(self) -> float:
        """Seconds until it is over, if it runs."""
        if self.limit is None:
            return math.inf
        return self._began + self.limit + min(self.stood, self.limit) - time.monotonic()

    @property
    def worn(self) -> bool:
        """Whether it has stood for as long as it may."""
        return self.limit is not None and self.stood >= self.limit

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around the time in which a call is held back."""
        self._held += 1
        self._stand(time.monotonic())
        try:
            yield
        finally:
            self._held -= 1
            self._go()

    def failed(self, since: float) -> None:
        """The engine failed a call that it was asked at `since` (of `time.monotonic`)."""
        self._failing = True
        self._stand(since)

    def served(self) -> None:
        """The engine answered."""
        if self._failing:
            self._failing = False
            self._go()

    @asynccontextmanager
    async def within(self, over: Callable[[], None]) -> AsyncIterator[None]:
        """Around what ends with the time: calls `over`, then raises `OutOfTimeError` in it."""
        if self.limit is None:
            yield
            return
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waiting[waiting] = over
                self._set()
                try:
                    yield
                finally:
                    del self._waiting[waiting]
                    self._set()
        except TimeoutError:
            if waiting.expired():
                raise OutOfTimeError from None
            raise

    def _stand(self, since: float) -> None:
        since = max(since, self._went)
        if self._since is None or since < self._since:
            self._since = since
            self._set()

    def _go(self) -> None:
        if self._since is not None and not self._held and not self._failing:
            self._stood, self._since, self._went = self.stood, None, time.monotonic()
            self._set()

    def _set(self) -> None:
        """Ring when it is over, if nothing changes until then and somebody waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self.limit is not None:
            standing = 0.0 if self._since is None else max(0.0, self.limit - self.stood)
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self.left) + standing, self._ring)

    def _ring(self) -> None:
        if self.left > 0:
            self._set()
            return
        for waiting, over in self._waiting.items():
            over()
            waiting.reschedule(asyncio.get_running_loop().time())
