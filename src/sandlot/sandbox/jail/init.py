"""PID 1 of a sandbox: never exec'd, so the image needs no runtime and nobody inside can trace it or read its memory.

It waits with all that every sandbox has, makes the root of the one that is asked for, then hands requests to workers,
reaps orphans, and watches memory where the machine has no limit groups. The end of its control stream is the end of
the sandbox.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from sandlot.sandbox.jail import accounts, execution, memory, mounts, posix, seccomp, syscalls, wire
from sandlot.sandbox.jail.cgroups import Payload
from sandlot.sandbox.jail.worker import Jail, Worker, fail

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_MEMORY_WATCH_SECONDS = 0.2
_TAKE_ATTEMPTS = 5
_IDLE_WORKERS = 2


def main(ids: dict[str, Any], orders: socket.socket) -> NoReturn:
    """Wait for the order to boot; then boot and serve. Never returns.

    Descriptors of the order: the life channel, the control stream, what to close when the boot is over, the root,
    trees, and those of the payload.
    """
    fault: OSError | None = None
    try:
        ready = _Ready.make(ids)
    except OSError as error:
        fault = error
    op, body, fds = wire.receive_request(orders)
    orders.close()
    if not op:
        os._exit(0)
    life, control, over, root, *rest = fds
    trees = [(fd, target) for fd, (_, target) in zip(rest, body["spec"]["binds"], strict=False)]
    join = rest[len(trees) :][: body["groups"]]
    payload = Payload(join, rest[-1] if len(rest) > len(trees) + len(join) else -1)
    try:
        if fault is not None:
            raise fault
        _set_up(body["spec"], ready, root, trees)
    except OSError as error:
        wire.send_packet(socket.socket(fileno=life), {"error": str(error), "errno": error.errno})
        os._exit(1)
    with socket.socket(fileno=life) as channel:
        wire.send_packet(channel, {"ready": body["facts"]})
    os.close(over)
    _serve(Jail(body["spec"], payload, mmap.mmap(-1, 8)), socket.socket(fileno=control))
    os._exit(0)


class _Ready(NamedTuple):
    """What waits for the order: /proc and /dev, and the open setting that bounds process numbers, or -1."""

    furniture: mounts.Furniture
    pid_max: int

    @classmethod
    def make(cls, ids: dict[str, Any]) -> _Ready:
        if ids["users"] == "range":
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        # What holds for every command holds for init and its workers, so that no command must ask for it.
        syscalls.drop_bounding_capabilities(execution.ROOT_CAPABILITIES)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        os.setsid()
        os.umask(0o022)
        socket.sethostname("sandlot")
        _loopback_up()
        furniture = mounts.furnish()
        pid_max = -1
        with suppress(OSError):
            syscalls.write_setting(f"{mounts.STAGE}/proc/sys/user/max_user_namespaces", "0")
        with suppress(OSError):
            pid_max = os.open(f"{mounts.STAGE}/proc/sys/kernel/pid_max", os.O_WRONLY | os.O_CLOEXEC)
        mounts.protect_proc()
        return cls(furniture, pid_max)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _set_up(spec: dict[str, Any], ready: _Ready, root: int, trees: list[tuple[int, str]]) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    mounts.enter(root, trees, ready.furniture, spec["shm_bytes"])
    accounts.prepare(spec)
    if ready.pid_max >= 0:
        with suppress(OSError):
            os.write(ready.pid_max, str(max(301, spec["limits"]["processes"] * 4)).encode())
        os.close(ready.pid_max)
    syscalls.install_filter(seccomp.build_filter())


def _serve(jail: Jail, control: socket.socket) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGUSR1, lambda *_: _kill_all())
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    staff = _Staff(jail)
    watched = busy = not jail.payload.join
    while True:
        posix.reap(os.WNOHANG)
        ready = {fd for fd, _ in poller.poll(_MEMORY_WATCH_SECONDS * 1000 if busy else None)}
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if not ready:
            processes = memory.processes(but={1, *staff.pids()})
            jail.count_kills(memory.enforce(processes, jail.spec["limits"]["memory"]))
            busy = bool(processes)
        if control.fileno() in ready:
            op, fds = wire.receive_sealed(control)
            if not op:
                return
            _dispatch(staff, op, fds, poller)
            busy = watched
        staff.welcome_back(ready, poller)


class _Staff:
    """The workers: those that wait for a request, at least one if there can be one, and those that handle one."""

    def __init__(self, jail: Jail) -> None:
        self._jail = jail
        self._busy: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self.refill()

    def pids(self) -> list[int]:
        return [worker.pid for worker in (*self._idle, *self._busy.values())]

    def refill(self) -> None:
        """See that one waits; where there can be no process more, the next request tries again."""
        with suppress(OSError):
            if not self._idle:
                self._idle.append(Worker(self._jail))

    def hand_over(self, op: bytes, fds: list[int], poller: select.poll) -> None:
        """Have a worker handle a request. Some may have been killed by programs inside; `OSError` when none can."""
        for _ in range(_TAKE_ATTEMPTS):
            worker = self._idle.pop() if self._idle else Worker(self._jail)
            if worker.take(op, fds):
                self._busy[worker.fileno()] = worker
                poller.register(worker.fileno(), select.POLLIN)
                return
            worker.dismiss()
        raise OSError(errno.EAGAIN, "programs inside kill whatever would handle a request")

    def welcome_back(self, ready: set[int], poller: select.poll) -> None:
        """Take note of who ended or is free again."""
        for fd in ready & self._busy.keys():
            worker = self._busy.pop(fd)
            poller.unregister(fd)
            if worker.is_free() and len(self._idle) < _IDLE_WORKERS:
                self._idle.append(worker)
            else:
                worker.dismiss()


def _dispatch(staff: _Staff, op: bytes, fds: list[int], poller: select.poll) -> None:
    with socket.socket(fileno=os.dup(fds[1])) as channel:
        try:
            if op == b"k":
                _kill_all()
                wire.send_packet(channel, {})
            else:
                staff.hand_over(op, fds, poller)
        except OSError as error:
            fail(channel, error.strerror or str(error), error.errno)
    wire.close_all(fds)
    staff.refill()


def _kill_all() -> None:
    """Kill every other process of the namespace in one call, which no fork can outrun, and wait for them."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    posix.reap()
