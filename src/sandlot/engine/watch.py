"""Notices that a server hangs while calls wait for it, which may be for an hour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sandlot.errors import EngineError

_SILENT = 3
"""Questions in a row that a server may leave open."""


class Watch:
    """Asks a server `every` so many seconds whether it still answers anything, as long as somebody waits for it."""

    def __init__(self, ask: Callable[[], Awaitable[object]], every: float) -> None:
        """`ask` raises `EngineError` where no answer comes."""
        self.patience = _SILENT * every
        self._ask = ask
        self._every = every
        self._waiting: set[asyncio.Timeout] = set()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def over(self) -> AsyncIterator[None]:
        """Around a wait of any length. Raises `TimeoutError` in it when the server hangs."""
        async with asyncio.timeout(None) as waiting:
            self._waiting.add(waiting)
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._watch())
            try:
                yield
            finally:
                self._waiting.discard(waiting)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        loop, silent = asyncio.get_running_loop(), 0
        asked = loop.time()
        while self._waiting and silent < _SILENT:
            await asyncio.sleep(asked + self._every - loop.time())
            asked = loop.time()
            try:
                await self._ask()
                silent = 0
            except EngineError:
                silent += 1
        for waiting in self._waiting:
            waiting.reschedule(loop.time())
