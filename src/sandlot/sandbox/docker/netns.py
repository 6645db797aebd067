"""The listening socket in a container's empty network namespace, handed out by a helper process of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from sandlot.errors import SandboxError

# Joining a user namespace needs a process without threads, which Sandlot is not.
_HELPER = """
import ctypes, os, socket, sys
pid, port, fd = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
def join(name, kind):
    ns = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
    ours = os.stat(f"/proc/self/ns/{name}")
    there = os.fstat(ns)
    if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) and libc.setns(ns, kind) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"setns {name}: {os.strerror(code)}")
try:
    join("user", 0x10000000)
    join("net", 0x40000000)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
except OSError as error:
    sys.exit(f"{error.strerror or error}")
socket.send_fds(socket.socket(fileno=fd), [b"1"], [listener.fileno()])
"""


def listen(pid: int, port: int) -> socket.socket:
    """A listening socket on 127.0.0.1:`port` in the network namespace of the process `pid`."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-I", "-S", "-c", _HELPER, str(pid), str(port), str(theirs.fileno())]
            done = subprocess.run(
                command, pass_fds=[theirs.fileno()], env={}, cwd="/", capture_output=True, timeout=20, check=False
            )
        if done.returncode:
            raise SandboxError(f"port {port} of the container: {done.stderr.decode(errors='replace').strip()}")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener


def exists(pid: int) -> bool:
    """Whether this machine has a process `pid`, whichever."""
    return pid > 0 and (Path("/proc") / str(pid)).exists()


def is_here(pid: int, variable: str) -> bool:
    """Whether process `pid` of this machine is the one whose environment has `variable`."""
    try:
        return variable.encode() in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def memory_kills_file(pid: int) -> Path | None:
    """Where the kernel counts what it killed for memory in the limit group of `pid`, if that can be read here."""
    try:
        lines = (Path("/proc") / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        places = {
            "": Path(f"/sys/fs/cgroup{path}/memory.events"),
            "memory": Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"),
        }
        place = places.get("memory" if "memory" in controllers.split(",") else controllers)
        if place is not None and os.access(place, os.R_OK):
            return place
    return None


def memory_kills(file: Path | None) -> int:
    """Processes killed for memory so far; 0 where it cannot be known."""
    if file is None:
        return 0
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
