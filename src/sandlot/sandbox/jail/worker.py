"""Handles one request in its own process, forked before the request comes, and answers on the request's channel."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from sandlot.sandbox.jail import archive, execution, files, wire
from sandlot.sandbox.jail.cgroups import Payload

_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_TAKEN, _FREE = b"t", b"f"
_TAKE_MILLISECONDS = 2000


class Jail(NamedTuple):
    """What every handler needs to know of its sandbox. `watched_kills` is shared memory."""

    spec: dict[str, Any]
    payload: Payload
    watched_kills: mmap.mmap

    def credentials(self, user: str) -> tuple[int, int]:
        """(uid, gid) of a user; with a single id, all users are that id."""
        if user == "root" and self.spec["users"] == "range":
            return 0, 0
        return self.spec["agent_id"], self.spec["agent_id"]

    def oom_kills(self) -> int:
        """Processes killed for memory so far, by the kernel's group or by the watch."""
        return self.payload.oom_kills() + self._watched()

    def count_kills(self, kills: int) -> None:
        """Add what the watch killed."""
        self.watched_kills[:8] = struct.pack("q", self._watched() + kills)

    def _watched(self) -> int:
        return int(struct.unpack("q", self.watched_kills[:8])[0])


class Worker:
    """A process that waits for a request, so that no fork stands between a request and its start.

    One that ran a command of which nothing is left waits for the next one.
    """

    def __init__(self, jail: Jail) -> None:
        """`OSError` when there can be no process more."""
        self._orders, theirs = wire.packet_pair()
        with theirs:
            try:
                self.pid = os.fork()
            except OSError:
                self._orders.close()
                raise
            if self.pid == 0:
                _work(jail, theirs)

    def fileno(self) -> int:
        """What becomes readable when it is free again, or has ended."""
        return self._orders.fileno()

    def take(self, op: bytes, fds: Sequence[int]) -> bool:
        """Hand a request over; False when the worker was killed before it began, so that another one may."""
        try:
            os.kill(self.pid, signal.SIGCONT)  # a program of its user may have stopped it
            wire.forward(self._orders, op, fds)
            poller = select.poll()
            poller.register(self._orders, select.POLLIN)
            if not poller.poll(_TAKE_MILLISECONDS):
                os.kill(self.pid, signal.SIGKILL)  # stopped again; it holds its socket, so the number is still its own
            return self._orders.recv(1) == _TAKEN
        except OSError:
            return False

    def is_free(self) -> bool:
        """Whether it waits for the next request; asked when there is news."""
        try:
            return self._orders.recv(1) == _FREE
        except OSError:
            return False

    def dismiss(self) -> None:
        """Let it go; it ends with what it does."""
        self._orders.close()


def _work(jail: Jail, orders: socket.socket) -> NoReturn:
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        wire.close_all_but({0, 1, 2, orders.fileno(), *jail.payload.files()})  # no other request's, and none of init's
        supervisor = execution.Supervisor(jail)
        while True:
            op, fds = wire.receive_sealed(orders)
            if not op:
                break
            orders.send(_TAKEN)
            with socket.socket(fileno=fds[1]) as channel:
                if op != b"x":
                    _handle(jail, channel, op, wire.unseal(fds[0]), fds[2:])
                    break
                if not _run(supervisor, channel, fds):
                    break
            supervisor.make_ready()
            orders.send(_FREE)
    finally:
        os._exit(0)


def _run(supervisor: execution.Supervisor, channel: socket.socket, fds: list[int]) -> bool:
    """Run a command; whether nothing is left of it."""
    try:
        return supervisor.run(channel, fds[0], fds[2:])
    except OSError as error:
        fail(channel, error.strerror or str(error), error.errno)
        return False


def _handle(jail: Jail, channel: socket.socket, op: bytes, body: dict[str, Any], fds: list[int]) -> None:
    try:
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
        fail(channel, error.strerror or str(error), error.errno)
    except Exception as error:  # the caller gets every failure; a handler has nobody else to tell
        fail(channel, f"{type(error).__name__}: {error}", None)


def fail(channel: socket.socket, text: str, code: int | None) -> None:
    """Answer that a request failed, if anybody still listens."""
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
