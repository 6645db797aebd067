"""What one session may take of the processor that all sessions share."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_INSTANT_S = 0.001
"""How long a body may keep the event loop without giving way to others."""
_MOMENT_S = 0.01
"""How long a body may have kept the event loop for the next one to be read there."""
_LONG_S = 0.2
"""A piece of work that takes longer has its session wait as long again before it reads another request."""
_APART_S = 60.0
"""How long after such a piece a session's work waits with what is large."""


class Share:
    """Does a session's work, in threads one piece after the other, and watches how long that takes. Lives on one event
    loop.

    `in_thread` takes the `size` of what work is about: what is large has a thread of its own.
    """

    def __init__(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self.quick = True
        """Whether the last body was read in a moment."""
        self._in_thread = in_thread
        self._lock = asyncio.Lock()
        self._spent = 0.0
        self._rested = -math.inf

    async def here(self, read: Callable[[], T]) -> T:
        """Read a body on the event loop."""
        try:
            return self._timed(read)
        finally:
            self.quick = self._spent <= _MOMENT_S
            if self._spent > _INSTANT_S:
                await asyncio.sleep(0)  # before the session's next one, which may come at once

    async def read(self, read: Callable[..., Any], *args: Any, size: int) -> Any:
        """Read a body, or unpack it, in a thread, once the session has rested."""
        await asyncio.sleep(self._rested - time.monotonic())
        done = await self.run(read, *args, size=size)
        self.quick = self._spent <= _MOMENT_S
        return done

    async def run(self, work: Callable[..., Any], *args: Any, size: int = 0) -> Any:
        """Do work in a thread."""
        async with self._lock:
            if time.monotonic() < self._rested + _APART_S:
                size = sys.maxsize
            try:
                return await self._in_thread(self._timed, work, *args, size=size)
            finally:
                if self._spent > _LONG_S:
                    self._rested = time.monotonic() + self._spent

    def _timed(self, work: Callable[..., T], *args: Any) -> T:
        began = time.thread_time()
        try:
            return work(*args)
        finally:
            self._spent = time.thread_time() - began
