"""The zygote: a small process without threads that forks one keeper per sandbox, so that Sandlot itself never forks.

Started by `python -I -S`, with an empty environment: nothing of Sandlot's memory, secrets or descriptors can be
inherited by a sandbox. It ends when Sandlot does, after its sandboxes are gone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from sandlot.sandbox.jail import cgroups, keeper, leftovers, posix, probe, seccomp, wire
from sandlot.sandbox.jail import ids as id_maps


def main(control_fd: int, run_dir: str) -> None:
    """Serve `control_fd` until its other end is closed, then remove `run_dir`."""
    control = socket.socket(fileno=control_fd)
    control.setblocking(True)
    signal.signal(signal.SIGCHLD, lambda *_: posix.reap(os.WNOHANG))
    _hide_arguments()
    seccomp.build_filter()  # once, for all that is forked from here
    gc.collect()
    gc.freeze()
    nursery = _Nursery()
    _serve(control, nursery)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    posix.reap()
    if nursery.ids.get("mapped_by") == "helper":
        id_maps.enter(nursery.ids)  # only there may it remove what belongs to these ids
    leftovers.remove_run(run_dir)


def _serve(control: socket.socket, nursery: _Nursery) -> None:
    while True:
        ready = nursery.wait(control)
        if not ready:
            continue
        op, fds = wire.receive_sealed(control)
        if not op:
            nursery.close()
            return
        if op == b"i":
            nursery.ids = wire.unseal(fds.pop())
        elif op == b"g":
            _settle(wire.read(fds[0]), socket.socket(fileno=fds.pop()))
        elif op == b"p":
            if os.fork() == 0:
                _be(partial(probe.main, *fds), fds)
        else:
            nursery.boot(op, fds)
        wire.close_all(fds)


def _settle(body: dict[str, Any], channel: socket.socket) -> None:
    """Make the limit group of this process one for sandboxes, and answer which it is."""
    with channel:
        try:
            path, controllers = cgroups.settle_in(body["mount_point"])
            wire.send_packet(channel, {"path": path, "controllers": controllers})
        except OSError as error:
            wire.send_packet(channel, {"error": str(error)})


class _Nursery:
    """A spare keeper that has made ready, and the ways to those that boot.

    The spare is made when nothing boots: making one beside it would make both wait for the kernel's mount lock.
    """

    def __init__(self) -> None:
        self.ids: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._spare: socket.socket | None = None
        self._booting: dict[int, socket.socket] = {}

    def wait(self, control: socket.socket) -> bool:
        """Wait for news, with a spare if there can be one; whether there is a request."""
        if self.ids and not self._booting and self._spare is None:
            self._spare = _fork_keeper(self.ids, self._last)
        poller = select.poll()
        for fd in (control.fileno(), *self._booting):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        for fd in ready & self._booting.keys():  # its keeper or init closed the other end
            self._booting.pop(fd).close()
        return control.fileno() in ready

    def boot(self, op: bytes, fds: list[int]) -> None:
        """Have the spare keeper boot a sandbox, or a new one where there is none or it was killed."""
        for _ in range(2):
            way = self._spare or _fork_keeper(self.ids, {})
            self._spare = None
            try:
                wire.forward(way, op, fds)
            except OSError:
                way.close()
                continue
            self._booting[way.fileno()] = way
            self._last = wire.read(fds[0])
            return

    def close(self) -> None:
        """Let go of the spare."""
        if self._spare is not None:
            self._spare.close()


def _fork_keeper(ids: dict[str, Any], guess: dict[str, Any]) -> socket.socket:
    """A keeper that makes ready and waits for its order, which may be like `guess`; the way to it."""
    ours, theirs = wire.packet_pair()
    with theirs:
        if os.fork() == 0:
            _be(partial(keeper.main, ids, guess, theirs), [theirs.fileno()])
    return ours


def _be(role: Callable[[], None], fds: list[int]) -> NoReturn:
    """Become another process, which has nothing of the zygote's but `fds`."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wire.close_all_but({0, 1, 2, *fds})
        role()
    finally:
        os._exit(0)


def _hide_arguments() -> None:
    """Overwrite the command line, which names paths of the machine and could be read inside through /proc/1."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, b"sandlot", min(7, end - start))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
