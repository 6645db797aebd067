"""The tokens that a session may still sample, shared out to its calls in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandlot.gateway.call import Counters

_AMPLE = 32_768
"""Tokens with which a call goes ahead that would wait for more: few turns are so long."""


class Spending:
    """Holds for each call what it may sample, so that all together never pass the limit. Lives on one event loop.

    `limit` None is no limit; `counters` tell what of it was sampled.
    """

    def __init__(self, limit: int | None, counters: Counters) -> None:
        self._limit = limit
        self._counters = counters
        self._held = 0
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def hold(self, wanted: int) -> AsyncIterator[int]:
        """Hold so many tokens, or all that are left, as soon as others do not hold them; 0 when all are spent."""
        while (part := self._part(wanted)) is None:
            self._given_back.clear()
            await self._given_back.wait()
        self._held += part
        try:
            yield part
        finally:
            self._held -= part
            self._given_back.set()

    def _part(self, wanted: int) -> int | None:
        if self._limit is None:
            return wanted
        left = max(0, self._limit - self._counters.sampled_tokens)
        free = left - self._held
        if left and free < min(wanted, left, _AMPLE):
            return None
        return min(wanted, left, max(0, free))
