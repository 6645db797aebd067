"""Limit groups, version 1 and 2: made and removed by the keeper, joined by the payload before it runs."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from sandlot.sandbox.jail import syscalls

_PERIOD = 100_000
CONTROLLERS = ("memory", "pids", "cpu")


class Payload(NamedTuple):
    """Open files by which a process joins the groups, and where the kernel counts its out-of-memory kills."""

    join: list[int]
    oom_events: int

    def enter(self) -> None:
        """Put the calling process into the groups."""
        for fd in self.join:
            os.write(fd, b"0")

    def oom_kills(self) -> int:
        """Processes killed for memory so far."""
        if self.oom_events < 0:
            return 0
        text = os.pread(self.oom_events, 4096, 0).decode()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def files(self) -> list[int]:
        """All descriptors."""
        return [*self.join, *([self.oom_events] if self.oom_events >= 0 else [])]


def settings(version: int, controller: str, limits: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """(file, value, required) to write for one controller ("" is the one group of version 2)."""
    memory, pids, cpu = str(limits["memory"]), str(limits["processes"]), limits["cpu"]
    if version == 2:
        rows = [("memory.max", memory, True), ("memory.swap.max", "0", False), ("pids.max", pids, True)]
        # Users' managers may have no cpu controller to give; then cores are bounded by affinity.
        return rows if cpu is None else [*rows, ("cpu.max", f"{int(cpu * _PERIOD)} {_PERIOD}", False)]
    if controller == "memory":
        return [("memory.limit_in_bytes", memory, True), ("memory.memsw.limit_in_bytes", memory, False)]
    if controller == "pids":
        return [("pids.max", pids, True)]
    if cpu is None:
        return []
    return [("cpu.cfs_period_us", str(_PERIOD), True), ("cpu.cfs_quota_us", str(int(cpu * _PERIOD)), True)]


def create(groups: Mapping[str, str], limits: Mapping[str, Any]) -> Payload:
    """Make the group directories (controller → path; "" → the version 2 group), set the limits, open the files."""
    join: list[int] = []
    oom_events = -1
    for controller, path in groups.items():
        os.mkdir(path, 0o755)
        for name, value, required in settings(1 if controller else 2, controller, limits):
            try:
                syscalls.write_setting(os.path.join(path, name), value)
            except OSError:
                if required:
                    raise
        # A thread that moves itself waits for no other process of the machine, unlike a move of a whole process.
        members = os.path.join(path, "tasks" if controller else "cgroup.procs")
        join.append(os.open(members, os.O_WRONLY | os.O_CLOEXEC))
        events = os.path.join(path, "memory.oom_control" if controller else "memory.events")
        if os.path.exists(events):
            oom_events = os.open(events, os.O_RDONLY | os.O_CLOEXEC)
    return Payload(join, oom_events)


def remove(paths: Iterable[str]) -> None:
    """Remove groups whose processes are dead; the kernel may need a moment to let the last one go."""
    for path in paths:
        for attempt in range(2000):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY or attempt == 1999:
                    break
                time.sleep(0.001)
            else:
                break


def make_parents(paths: Iterable[str], listing: str) -> None:
    """Make the groups of a run, below which its sandboxes get theirs, and list them in the file `listing`."""
    made = list(paths)
    with open(listing, "w") as file:
        file.write("\n".join(made))
    for path in made:
        os.mkdir(path, 0o755)
        if os.path.exists(os.path.join(path, "cgroup.subtree_control")):
            give_on(path)


def give_on(path: str) -> list[str]:
    """Let groups below a group of version 2 have its controllers; which of ours these are."""
    with open(os.path.join(path, "cgroup.controllers")) as file:
        found = [name for name in file.read().split() if name in CONTROLLERS]
    if not {"memory", "pids"} <= set(found):
        raise OSError(errno.ENOTSUP, f"{path} has no memory and pids controllers")
    syscalls.write_setting(os.path.join(path, "cgroup.subtree_control"), " ".join(f"+{name}" for name in found))
    return found


def settle_in(mount_point: str) -> tuple[str, list[str]]:
    """Make the group of version 2 that this process is in a parent of others, by moving down; its path, controllers.

    Only a group without processes can give controllers on, so it must have been delegated to this process alone.
    """
    with open("/proc/self/cgroup") as file:
        own = next(line.split("::", 1)[1].strip() for line in file if line.startswith("0::"))
    if own == "/":
        raise OSError(errno.EPERM, "this process is in no limit group of its own")
    path = mount_point + own
    below = os.path.join(path, "zygote")
    os.mkdir(below, 0o755)
    try:
        syscalls.write_setting(os.path.join(below, "cgroup.procs"), str(os.getpid()))
        return path, give_on(path)
    except OSError:
        syscalls.write_setting(os.path.join(path, "cgroup.procs"), str(os.getpid()))
        os.rmdir(below)
        raise


def remove_listed(listing: str) -> None:
    """Remove the groups listed in a file; no file, no groups."""
    with suppress(OSError), open(listing) as file:
        remove(file.read().splitlines())
