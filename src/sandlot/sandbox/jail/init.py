"""PID 1 of a sandbox: never exec'd, so the image needs no runtime and nobody inside can trace it or read its memory.

It makes the root, then answers requests by forking a handler for each, reaps orphans, and watches memory where the
machine has no limit groups. The end of its control stream is the end of the sandbox.
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
from dataclasses import dataclass
from typing import Any, NoReturn

from sandlot.sandbox.jail import accounts, archive, execution, files, memory, mounts, syscalls, wire
from sandlot.sandbox.jail.cgroups import Payload

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_MEMORY_WATCH_SECONDS = 0.2


@dataclass
class Jail:
    """What every handler needs to know of its sandbox."""

    spec: dict[str, Any]
    payload: Payload
    watched_kills: mmap.mmap
    """Shared counter of processes that the memory watch killed."""

    def credentials(self, user: str) -> tuple[int, int]:
        """(uid, gid) of a user; with a single id, all users are that id."""
        if user == "root" and self.spec["users"] == "range":
            return 0, 0
        return self.spec["agent_id"], self.spec["agent_id"]

    def oom_kills(self) -> int:
        """Processes killed for memory so far, by the kernel's group or by the watch."""
        return self.payload.oom_kills() + int(struct.unpack("q", self.watched_kills[:8])[0])


def main(
    spec: dict[str, Any],
    plan: mounts.Plan,
    payload: Payload,
    life: socket.socket,
    control_fd: int,
    facts: dict[str, Any],
) -> NoReturn:
    """Boot and serve; never returns."""
    try:
        _set_up(spec, plan)
    except OSError as error:
        wire.send_packet(life, {"error": str(error), "errno": error.errno})
        os._exit(1)
    wire.send_packet(life, {"ready": facts})
    life.close()
    _serve(Jail(spec, payload, mmap.mmap(-1, 8)), socket.socket(fileno=control_fd))
    os._exit(0)


def _set_up(spec: dict[str, Any], plan: mounts.Plan) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    mounts.step_in(plan)
    if spec["users"] == "range":
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    os.setsid()
    os.umask(0o022)
    socket.sethostname("sandlot")
    _loopback_up()
    mounts.enter(plan, spec["shm_bytes"])
    accounts.prepare(spec)
    _write_if_possible("/proc/sys/user/max_user_namespaces", "0")
    _write_if_possible("/proc/sys/kernel/pid_max", str(max(301, spec["limits"]["processes"] * 4)))
    mounts.protect_proc()


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _write_if_possible(path: str, value: str) -> None:
    with suppress(OSError), open(path, "w") as file:
        file.write(value)


def _serve(jail: Jail, control: socket.socket) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGUSR1, lambda *_: _kill_all())
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    watched = not jail.payload.join
    while True:
        alone = _reap()
        events = poller.poll(_MEMORY_WATCH_SECONDS * 1000 if watched and not alone else None)
        ready = {fd for fd, _ in events}
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if not events:
            kills = memory.enforce(jail.spec["limits"]["memory"])
            jail.watched_kills[:8] = struct.pack("q", struct.unpack("q", jail.watched_kills[:8])[0] + kills)
        if control.fileno() in ready:
            op, body, fds = wire.receive_request(control)
            if not op:
                return
            _dispatch(jail, control, op, body, fds, (wake_read, wake_write))
            for fd in fds:
                os.close(fd)


def _reap() -> bool:
    """Reap what died; whether no process is left but init."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _kill_all() -> None:
    """Kill every other process of the namespace in one call, which no fork can outrun, and wait for them."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _dispatch(
    jail: Jail, control: socket.socket, op: bytes, body: dict[str, Any], fds: list[int], ours: tuple[int, int]
) -> None:
    channel = socket.socket(fileno=os.dup(fds[0]))
    with channel:
        if op == b"k":
            _kill_all()
            with suppress(OSError):
                wire.send_packet(channel, {})
            return
        try:
            child = os.fork()
        except OSError as error:
            with suppress(OSError):
                wire.send_packet(channel, {"error": f"fork: {error}", "errno": error.errno})
            return
        if child == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (fds[0], control.fileno(), *ours):
                    os.close(fd)
                _handle(jail, channel, op, body, fds[1:])
            finally:
                os._exit(0)


def _handle(jail: Jail, channel: socket.socket, op: bytes, body: dict[str, Any], fds: list[int]) -> None:
    """Run one request in its own process and answer on its channel."""
    try:
        if op == b"x":
            execution.supervise(jail, channel, body, fds)
            return
        if op == b"l":
            with _listen(body["port"]) as listener:
                wire.send_packet(channel, {}, [listener.fileno()])
            return
        files.become(
            *jail.credentials(body["user"]), keep_root=jail.spec["users"] == "single" and body["user"] == "root"
        )
        if op == b"t":
            _send_terminal(channel)
        elif op == b"r":
            files.send_file(channel, body["path"])
        elif op == b"w":
            files.write_file(body["path"], fds[0], body["mode"])
        elif op == b"u":
            archive.unpack(body["path"], fds[0])
        elif op == b"d":
            archive.pack(body["path"], fds[0], frozenset(body["exclude_names"]), body["max_bytes"])
        if op not in (b"r", b"t"):
            wire.send_packet(channel, {})
    except OSError as error:
        _fail(channel, error.strerror or str(error), error.errno)
    except Exception as error:  # the caller gets every failure; a handler has nobody else to tell
        _fail(channel, f"{type(error).__name__}: {error}", None)


def _fail(channel: socket.socket, text: str, code: int | None) -> None:
    with suppress(OSError):
        wire.send_packet(channel, {"error": text[:2000], "errno": code})


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno or errno.EIO, f"port {port}: {error.strerror}") from error
    listener.listen(512)
    return listener


def _send_terminal(channel: socket.socket) -> None:
    """Answer with both sides of a new terminal of this sandbox, owned by the user of the request."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    wire.send_packet(channel, {}, [master, slave])
