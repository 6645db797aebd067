"""Labels that say who made a container, and whether that process is dead."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

PREFIX = "sandlot."
MINE = f"{PREFIX}sandbox"
_MACHINE, _OWNER, _UNTIL = f"{PREFIX}machine", f"{PREFIX}owner", f"{PREFIX}until"
_SPARE_SECONDS = 600.0


def labels(seconds: float) -> dict[str, str]:
    """Labels of what this process makes, which lives for `seconds` at most."""
    return {
        _MACHINE: _machine(),
        _OWNER: _process(os.getpid()),
        _UNTIL: str(int(time.time() + seconds + _SPARE_SECONDS)),
    }


def is_dead(found: Mapping[str, str]) -> bool:
    """Whether the maker is known to be dead: it was of this machine and is gone, or its time is over."""
    if found.get(_UNTIL, "").isdigit() and int(found[_UNTIL]) < time.time():
        return True
    if found.get(_MACHINE) != _machine():
        return False
    pid, _, _ = found.get(_OWNER, "").partition("-")
    return pid.isdigit() and _process(int(pid)) != found[_OWNER]


def name(found: Mapping[str, str]) -> str:
    """The maker, for people."""
    pid = found.get(_OWNER, "").partition("-")[0]
    return f"process {pid}" + ("" if found.get(_MACHINE) == _machine() else " elsewhere")


def _machine() -> str:
    """This boot of this machine, and this namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:16]


def _process(pid: int) -> str:
    try:
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return f"{pid}-{start}"
