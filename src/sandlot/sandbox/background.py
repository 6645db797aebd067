"""Work that goes on when whoever asked for it went away, and the end of many things at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

_Made = TypeVar("_Made")


class Background:
    """Work that nobody waits for until `finish`; how it fails is told nobody."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Do it, and hold it until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def made(self, making: Coroutine[Any, Any, _Made], undo: Callable[[_Made], Awaitable[object]]) -> _Made:
        """What `making` makes. A cancelled caller does not break that off: it is made all the same, and then undone."""
        task = asyncio.create_task(making)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.begin(_undone(task, undo))
            raise

    async def finish(self, seconds: float) -> None:
        """Wait until all is done, some seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)


async def _undone(making: asyncio.Task[_Made], undo: Callable[[_Made], Awaitable[object]]) -> None:
    await undo(await making)


async def all_of(ends: Iterable[Awaitable[None]]) -> None:
    """Wait for all, whatever becomes of one; then raise what failed first."""
    for failure in await asyncio.gather(*ends, return_exceptions=True):
        if failure is not None:
            raise failure
