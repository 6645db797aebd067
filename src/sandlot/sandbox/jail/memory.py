"""The memory watch for machines without limit groups: sums what the sandbox holds and kills its largest process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress


def _status_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process, without file pages; pages shared after a fork count each time."""
    total = 0
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def _proportional_bytes(pid: int) -> int:
    """The same with shared pages divided among their users; costs a walk of the page tables."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith((b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")):
                total += int(line.split()[1]) * 1024
    return total


def processes(but: set[int]) -> list[int]:
    """All processes of the namespace except those in `but`."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in but]


def enforce(pids: list[int], limit: int) -> int:
    """Kill the largest of `pids` when all together are over `limit` bytes; how many were killed."""
    held = _held(pids, _status_bytes)
    if sum(held.values()) <= limit:
        return 0
    held |= _held(pids, _proportional_bytes)
    if sum(held.values()) <= limit:
        return 0
    with suppress(ProcessLookupError):
        os.kill(max(held, key=lambda pid: held[pid]), signal.SIGKILL)
        return 1
    return 0


def _held(pids: list[int], count: Callable[[int], int]) -> dict[int, int]:
    held: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):  # it may end while we look
            held[pid] = count(pid)
    return held
