"""The keeper: the parent of one sandbox's init, outside its namespaces. It sets up, watches, kills and cleans up.

It holds one end of the life channel. A byte on it, or its end (Sandlot died, however), ends the sandbox: init is
killed, which takes the whole pid namespace with it, then limit groups and files go.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from sandlot.sandbox.jail import cgroups, mounts, syscalls, tree, wire
from sandlot.sandbox.jail.ground import Ground
from sandlot.sandbox.jail.nest import Nest

_DISK_SCAN_SECONDS = 1.0
_DISK_SCAN_AT_LEAST_SECONDS = 30.0


def main(ids: dict[str, Any], guess: dict[str, Any], orders: socket.socket) -> None:
    """Make ready, wait for an order, boot the sandbox, keep it until told otherwise, and leave nothing.

    `guess`: the order may be like this one.
    """
    nest: Nest | None = None
    ground: Ground | None = None
    fault: OSError | None = None
    try:
        syscalls.write_setting("/proc/self/oom_score_adj", "500")  # inherited: sandboxes go before Sandlot
        nest = Nest(ids)
        ground = Ground.guessed(guess, nest.userns)
    except OSError as error:
        fault = error
    op, spec, fds = wire.receive_request(orders)
    if ground is not None and not (op and ground.fits(spec)):
        ground.discard()
        ground = None
    if not op:
        if nest is not None:
            nest.close()
        return
    life, control = socket.socket(fileno=fds[0]), fds[1]
    snapshot, reason = False, ""
    try:
        if nest is None:
            raise fault or OSError("no namespaces")
        upper = _boot(nest, ground, spec, [life.fileno(), control, orders.fileno()])
    except OSError as error:
        _tell(life, {"error": str(error), "errno": error.errno})
        wire.close_all((control, orders.detach()))
        if nest is not None:
            nest.close()
    else:
        wire.close_all((control, orders.detach()))
        snapshot, reason = _watch(spec, life, nest.init, upper)
        _tell(life, {"dead": reason})  # first, so that whoever misses a command knows why
        with suppress(ProcessLookupError):
            os.kill(nest.init, signal.SIGKILL)
        os.waitpid(nest.init, 0)
        os.close(upper)
    os.chdir("/")
    cgroups.remove(spec["cgroups"].values())
    if not snapshot:
        tree.remove(spec["dir"])


def _tell(life: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):
        wire.send_packet(life, message)


def _boot(nest: Nest, ground: Ground | None, spec: dict[str, Any], fds: list[int]) -> int:
    """Mount what the sandbox is made of and order its init to go on; the open upper directory."""
    payload = cgroups.create(spec["cgroups"], spec["limits"])
    if ground is None:
        ground = Ground(spec, spec["dir"], nest.userns)
    else:
        ground.move(spec["dir"])
    upper = os.open(f"{spec['dir']}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    trees = [mounts.open_read_only(source, nest.userns)[0] for source, _ in spec["binds"]]
    body = {"spec": spec, "groups": len(payload.join), "facts": {"image_owner": ground.image_owner}}
    more = [ground.root, *trees, *payload.files()]
    wire.send_request(nest.channel, b"b", body, [*fds, *more])
    wire.close_all(more)
    nest.enter()
    return upper


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
