"""The memory watch for machines without limit groups: sums what the sandbox holds and kills its largest process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def _status_bytes(pid: str) -> int:
    """Anonymous and shared memory of a process, without file pages; pages shared after a fork count each time."""
    total = 0
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def _proportional_bytes(pid: str) -> int:
    """The same with shared pages divided among their users; costs a walk of the page tables."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith((b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")):
                total += int(line.split()[1]) * 1024
    return total


def enforce(limit: int) -> int:
    """Kill the largest process when all but init together are over `limit` bytes; how many were killed."""
    held: dict[str, int] = {}
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != "1":
            with suppress(OSError, ValueError, IndexError):
                held[pid] = _status_bytes(pid)
    if sum(held.values()) <= limit:
        return 0
    for pid in held:
        with suppress(OSError, ValueError, IndexError):
            held[pid] = _proportional_bytes(pid)
    if sum(held.values()) <= limit:
        return 0
    largest = max(held, key=lambda pid: held[pid])
    with suppress(ProcessLookupError):
        os.kill(int(largest), signal.SIGKILL)
        return 1
    return 0
