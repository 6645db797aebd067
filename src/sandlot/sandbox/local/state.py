"""The directory of a run and of its sandboxes: who holds it, and how what a dead run left is removed."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sandlot.cache import locked
from sandlot.sandbox.base import Running


def open_run(parent: Path) -> tuple[Path, int]:
    """Make a directory for this run below `parent`, and the lock that says that the run lives."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if parent.stat().st_uid != os.geteuid():
        raise PermissionError(0, "it belongs to another user")
    with locked(parent / ".lock"):
        run = parent / f"run-{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}"
        run.mkdir(mode=0o700)
        lock = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return run, lock


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: tells it from a later one of the same number."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def present(path: Path) -> bool:
    """Whether anything is at `path`."""
    return os.path.lexists(path)


def sweep(parent: Path, remove: Callable[[str, str], int]) -> int:
    """Have `remove("run", path)` remove each run that nobody holds any more; how many sandboxes that were.

    A run is held by a lock that its Sandlot process and zygote share; the kernel frees it when both are dead, and it
    holds across containers that share the directory, where process numbers would lie.
    """
    removed = 0
    if not parent.is_dir() or parent.stat().st_uid != os.geteuid() or not os.access(parent, os.W_OK):
        return 0
    with locked(parent / ".lock"):
        for run in parent.glob("run-*"):
            try:
                fd = os.open(run / ".lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                fd = -1
            try:
                if fd >= 0:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                removed += remove("run", str(run))
            finally:
                if fd >= 0:
                    os.close(fd)
    return removed


def running(parent: Path) -> list[Running]:
    """The sandboxes of all runs below `parent` that somebody holds, oldest first."""
    found: list[Running] = []
    for run in parent.glob("run-*"):
        try:
            with open(run / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError:
            continue
        else:
            continue
        for about in run.glob("*/about.json"):
            with suppress(OSError, ValueError):  # it ends while we look
                facts = json.loads(about.read_text())
                owner = f"process {run.name.split('-')[1]}"
                found.append(
                    Running(about.parent.name, facts["image"], owner, facts["started"], facts["labels"]),
                )
    return sorted(found, key=lambda one: one.started)


def namespaces_cure(refused: str) -> str:
    """Why namespaces are forbidden here and what to do, in one sentence."""

    def value(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    start = f"local sandboxes need user namespaces, which this machine refuses ({refused}); "
    if value("/proc/sys/user/max_user_namespaces") == "0":
        return start + "allow them: sysctl user.max_user_namespaces=15000"
    if value("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return start + "allow them: sysctl kernel.unprivileged_userns_clone=1"
    if value("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return start + "run as root, or allow them: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    return start + "inside a container, start it with a seccomp profile that allows unshare, or use another backend"
