"""Keeps a local backend busy until it is killed: `python end_run.py DIRECTORY` forks `owners` that boot without end.

Prints the process number of each owner; the marker of their commands is the sleep of 194.5 seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend

OWNERS = 6


async def own(directory: Path) -> None:
    """Boot, use, freeze, boot from that, kill: over and over."""
    backend = LocalBackend(directory)

    async def life() -> None:
        while True:
            first = await backend.create(SandboxSpec())
            await first.spawn("setsid sleep 194.5 & sleep 194.5")
            await first.exec("touch x")
            frozen = await first.snapshot()
            async with await backend.create(SandboxSpec(snapshot=frozen)) as second:
                await second.exec("ls x; sleep 194.5 &")
            await frozen.discard()

    await asyncio.gather(*(life() for _ in range(2)))


def main() -> None:
    """Fork the owners, and wait for their ends."""
    for _ in range(OWNERS):
        if (child := os.fork()) == 0:
            signal.alarm(120)
            asyncio.run(own(Path(sys.argv[1])))
        print(child, flush=True)
    for _ in range(OWNERS):
        os.wait()


if __name__ == "__main__":
    main()
