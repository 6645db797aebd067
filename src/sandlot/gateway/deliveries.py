"""Which turns reached their clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deliveries:
    """The turns of a session whose answers were written to the last byte; `note` is told of each once.

    A turn counts from the writing of its last bytes on, since the client may act on them before the writer gets to say
    that they are out. One whose connection breaks then was not delivered, unless another connection had it too.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._done: set[str] = set()
        self._writing: Counter[str] = Counter()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._done or (turn_id in self._writing and not self._closed)

    @contextmanager
    def writing(self, turn_id: str) -> Iterator[None]:
        """Around the writing of a turn's last bytes."""
        self._writing[turn_id] += 1
        self._quiet.clear()
        try:
            yield
            if turn_id not in self._done and not self._closed:
                self._done.add(turn_id)
                self._note(turn_id)
        finally:
            self._writing[turn_id] -= 1
            if not self._writing[turn_id]:
                del self._writing[turn_id]
            if not self._writing:
                self._quiet.set()

    async def close(self, timeout: float) -> None:
        """Wait for what is being written (bounded); what is not out by then was not delivered."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._quiet.wait()
        self._closed = True
