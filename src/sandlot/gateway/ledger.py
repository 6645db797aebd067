"""The one who writes to a session's recorder, one write at a time, marks of delivery when there is time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sandlot.gateway.call import Recorder

T = TypeVar("T")

log = logging.getLogger(__name__)
_MARK_WITHIN_S = 0.1
"""How long a mark waits to be written together with what comes next."""
_QUICK_S = 0.005
"""How long a write may have taken for the next one not to need a thread."""


class Writers:
    """Where the writes of all sessions block: in threads, but on the event loop while it would only sleep meanwhile.

    That is when nobody else is served (`alone`) and the disk was quick the last time. Putting the loop to sleep and
    waking it costs more than a quick write. Lives on one event loop.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="sandlot-journal")
        self._last_s = float("inf")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do blocking work."""
        if self._last_s < _QUICK_S and self._alone():
            return self._timed(work, *args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._timed, work, *args)

    def close(self) -> None:
        """Wait for what is being written."""
        self._threads.shutdown(wait=True)

    def _timed(self, work: Callable[..., T], *args: Any) -> T:
        began = time.perf_counter()
        try:
            return work(*args)
        finally:
            self._last_s = time.perf_counter() - began


class Ledger:
    """Serialises the writes of one session. Lives on one event loop."""

    def __init__(self, recorder: Recorder, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self.recorder = recorder
        self._in_thread = in_thread
        self._lock = asyncio.Lock()
        self._marks: deque[str] = deque()
        self._due: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do work that may use the recorder."""
        async with self._lock:
            done: T = await self._in_thread(self._after_marks, work, *args)
            return done

    def delivered(self, turn_id: str) -> None:
        """Note that a turn reached its client; written soon."""
        self._marks.append(turn_id)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_MARK_WITHIN_S, self.flush)

    def flush(self) -> set[asyncio.Task[None]]:
        """Write the marks that wait, and give the tasks that write."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._marks:
            task = asyncio.create_task(self.run(_nothing))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return self._writing

    def _after_marks(self, work: Callable[..., T], *args: Any) -> T:
        while self._marks:
            turn_id = self._marks.popleft()
            try:
                self.recorder.delivered(turn_id)
            except Exception:  # the turn itself is recorded; what comes next must not fail for its mark
                log.exception("turn %s: that it was delivered could not be recorded", turn_id)
        return work(*args)


def _nothing() -> None: ...
