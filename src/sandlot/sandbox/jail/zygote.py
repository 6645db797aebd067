"""The zygote: a small process without threads that forks one keeper per sandbox, so that Sandlot itself never forks.

Started by `python -I -S`, with an empty environment: nothing of Sandlot's memory, secrets or descriptors can be
inherited by a sandbox. It ends when Sandlot does, after its sandboxes are gone.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from sandlot.sandbox.jail import keeper, leftovers, probe, seccomp, wire


def main(control_fd: int, run_dir: str) -> None:
    """Serve `control_fd` until its other end is closed, then remove `run_dir`."""
    control = socket.socket(fileno=control_fd)
    control.setblocking(True)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    _hide_arguments()
    seccomp.build_filter()  # once, for all that is forked from here
    gc.collect()
    gc.freeze()
    while True:
        op, body, fds = wire.receive_request(control)
        if not op:
            break
        if os.fork() == 0:
            _child(control, op, body, fds)
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _wait_for_all()
    leftovers.remove_run(run_dir)


def _child(control: socket.socket, op: bytes, body: dict[str, Any], fds: list[int]) -> NoReturn:
    """Be the keeper of one sandbox, or a probe."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        close_all_but({0, 1, 2, *fds})
        if op == b"c":
            keeper.main(body, socket.socket(fileno=fds[0]), fds[1])
        elif op == b"p":
            probe.main(body, socket.socket(fileno=fds[0]))
    finally:
        os._exit(0)


def _hide_arguments() -> None:
    """Overwrite the command line, which names paths of the machine and could be read inside through /proc/1."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, b"sandlot", min(7, end - start))


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor that is not in `keep`."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in keep:
            try:
                os.close(fd)
            except OSError as error:
                if error.errno != errno.EBADF:  # the listing's own descriptor is gone already
                    raise


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _wait_for_all() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
