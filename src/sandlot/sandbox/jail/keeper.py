"""The keeper: the parent of one sandbox's init, outside its namespaces. It sets up, watches, kills and cleans up.

It holds one end of the life channel. A byte on it, or its end (Sandlot died, however), ends the sandbox: init is
killed, which takes the whole pid namespace with it, then limit groups and files go.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from sandlot.sandbox.jail import cgroups, init, mounts, syscalls, tree, wire
from sandlot.sandbox.jail.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)

_DISK_SCAN_SECONDS = 1.0
_DISK_SCAN_AT_LEAST_SECONDS = 30.0


def main(spec: dict[str, Any], life: socket.socket, control_fd: int) -> None:
    """Boot the sandbox, keep it until told otherwise, and leave nothing."""
    reason = ""
    child = 0
    snapshot = False
    try:
        child, upper = _boot(spec, life, control_fd)
    except OSError as error:
        _tell(life, {"error": str(error), "errno": error.errno})
    os.close(control_fd)
    if child:
        snapshot, reason = _watch(spec, life, child, upper)
        _tell(life, {"dead": reason})  # first, so that whoever misses a command knows why
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(upper)
    os.chdir("/")
    cgroups.remove(spec["cgroups"].values())
    if not snapshot:
        tree.remove(spec["dir"])


def _tell(life: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):
        wire.send_packet(life, message)


def _boot(spec: dict[str, Any], life: socket.socket, control_fd: int) -> tuple[int, int]:
    """Make the namespaces and fork init; its pid and the open upper directory."""
    _write("/proc/self/oom_score_adj", "500")  # inherited: when memory runs out, sandboxes go before Sandlot
    payload = cgroups.create(spec["cgroups"], spec["limits"])
    os.chdir(spec["dir"])
    new = CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP
    upper = os.open("upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    facts: dict[str, Any]
    if spec["users"] == "range":
        syscalls.unshare(CLONE_NEWNS)
        mounts.make_private()
        userns = mapped_userns(spec["base"])
        plan = mounts.prepare(spec, userns)
        syscalls.setns(userns, CLONE_NEWUSER)
        os.close(userns)
        syscalls.unshare(new)
    else:
        uid, gid = os.geteuid(), os.getegid()
        syscalls.unshare(CLONE_NEWUSER | CLONE_NEWNS)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{spec['agent_id']} {uid} 1")
        _write("/proc/self/gid_map", f"{spec['agent_id']} {gid} 1")
        mounts.make_private()
        plan = mounts.prepare(spec, None)
        syscalls.unshare(new)
    facts = {"image_owner": plan.image_owner}
    child = os.fork()
    if child == 0:
        try:
            os.close(upper)
            init.main(spec, plan, payload, life, control_fd, facts)
        finally:
            os._exit(1)
    plan.close()
    payload.close()
    return child, upper


def mapped_userns(base: int) -> int:
    """A user namespace whose ids 0..65535 are `base`.. outside: its root is nobody on the machine."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.unshare(CLONE_NEWUSER)
            os.write(ready_write, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(ready_write)
    try:
        if os.read(ready_read, 1) != b"1":
            raise OSError(errno.EPERM, "unshare: a new user namespace is refused")
        _write(f"/proc/{child}/uid_map", f"0 {base} 65536")
        _write(f"/proc/{child}/gid_map", f"0 {base} 65536")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _watch(spec: dict[str, Any], life: socket.socket, child: int, upper: int) -> tuple[bool, str]:
    """Wait for the end: whether the files are to be kept, and why it ended."""
    limits = spec["limits"]
    deadline = time.monotonic() + limits["wall_clock"]
    disk = _DiskWatch(upper, limits["disk"])
    process = os.pidfd_open(child)
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poller.register(process, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return False, f"the wall clock limit of {limits['wall_clock']:g} s is over"
        events = poller.poll(min(left, _DISK_SCAN_SECONDS) * 1000)
        if not events:
            if disk.exceeded():
                os.kill(child, signal.SIGUSR1)  # init kills all processes but itself
            continue
        if any(fd == life.fileno() for fd, _ in events):
            try:
                order = life.recv(1)
            except OSError:
                order = b""
            return order == b"s", "" if order else "its owner is gone"
        return False, "its init died"


class _DiskWatch:
    """Whether the upper directory is over its limit, walked only when the file system grew enough to matter."""

    def __init__(self, upper: int, limit: int) -> None:
        self._upper, self._limit = upper, limit
        self._counted = 0
        self._used = self._filesystem_used()
        self._walked = time.monotonic()

    def _filesystem_used(self) -> int:
        status = os.fstatvfs(self._upper)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def exceeded(self) -> bool:
        used, now = self._filesystem_used(), time.monotonic()
        grown, room = used - self._used, self._limit - self._counted
        if grown <= 0 and now - self._walked < _DISK_SCAN_AT_LEAST_SECONDS:
            return False
        if grown < room // 2 and now - self._walked < _DISK_SCAN_AT_LEAST_SECONDS:
            return False
        self._counted = tree.disk_usage(self._upper, self._limit)
        self._used, self._walked = used, time.monotonic()
        return self._counted > self._limit
