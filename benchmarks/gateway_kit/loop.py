"""What the processes of the benchmark share: their event loop, and the commands on standard input."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def obey(port: int, handle: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """Say where this process serves, then answer each JSON line on standard input with one, until it closes."""
    print("READY", port, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            answer = await handle(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class StallProbe:
    """The longest time for which the event loop did not come round, in seconds.

    `longest` is by the clock. `longest_own` counts of each stall only what this process was on a CPU meanwhile, which
    leaves out what other processes of a busy machine did to it.
    """

    def __init__(self) -> None:
        self.longest = self.longest_own = 0.0
        self._due = self._spent = 0.0

    def start(self) -> None:
        self.longest = self.longest_own = 0.0
        self._spent = time.process_time()
        loop = asyncio.get_running_loop()
        if not self._due:
            self._due = loop.time() + 0.005
            loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now, spent = loop.time(), time.process_time()
        late = now - self._due
        self.longest = max(self.longest, late)
        self.longest_own = max(self.longest_own, min(late, spent - self._spent))
        self._spent = spent
        self._due = now + 0.005
        loop.call_at(self._due, self._tick)
