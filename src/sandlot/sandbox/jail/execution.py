"""Running one command: the payload's hardening, and the supervisor that holds its whole tree together.

The supervisor is the subreaper of everything the command starts, so daemons and double forks stay its descendants and
can be found and killed. It reports the command's end on its channel and takes orders there: `k` kills the tree, `r`
lets what is left run on as daemons of the sandbox, and the channel's end kills.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import resource
import select
import signal
import socket
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from sandlot.sandbox.jail import syscalls, wire

if TYPE_CHECKING:
    from sandlot.sandbox.jail.worker import Jail

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, setfcap
ROOT_CAPABILITIES = sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 10, 31))
_KILL_SECONDS = 3.0
_START_ATTEMPTS = 5
_BEGUN = b"b"
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Supervisor:
    """Runs commands in this process's children, one after the other; the next child waits for its command."""

    def __init__(self, jail: Jail) -> None:
        self._jail = jail
        self._next: tuple[int, socket.socket] | None = None
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def make_ready(self) -> None:
        """Fork the child of the next command ahead, when nothing is left of the last one."""
        way, theirs = wire.packet_pair()
        with theirs:
            child = os.fork()
            if child == 0:
                _await_command(self._jail, theirs)
        self._next = child, way

    def run(self, channel: socket.socket, sealed: int, fds: list[int]) -> bool:
        """Start the command of `sealed` with `fds` (stdout, stderr, and stdin if given) and stay until its tree ends.

        Whether nothing is left of it, so that this process may run another one.
        """
        kills_before = self._jail.oom_kills()
        main, fault = self._start(sealed, fds)
        wire.close_all((sealed, *fds))
        if fault:
            wire.send_packet(channel, {"error": fault.decode("utf-8", "replace"), "errno": None})
            return kill_tree(main)[1]
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        reported = False
        while True:
            status, empty = _reap(main)
            if status is not None:
                self._report(channel, status, kills_before)
                reported = True
            if empty:
                return True
            ready = {fd for fd, _ in poller.poll()}
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if channel.fileno() in ready:
                if _receive(channel) == b"r":
                    return False
                status, all_dead = kill_tree(main)
                if status is not None and not reported:
                    self._report(channel, status, kills_before)
                if not all_dead:
                    wire.send_packet(channel, {"escaped": True})
                return all_dead

    def _start(self, sealed: int, fds: list[int]) -> tuple[int, bytes]:
        """The child that runs the command, and what went wrong before; one that was killed in waiting is replaced."""
        for _ in range(_START_ATTEMPTS):
            if self._next is None:
                self.make_ready()
            assert self._next is not None
            (main, way), self._next = self._next, None
            fault_read, fault_write = os.pipe2(os.O_CLOEXEC)
            with way, suppress(OSError):
                os.kill(main, signal.SIGCONT)  # a program of its user may have stopped it
                wire.forward(way, b"x", [sealed, fault_write, *fds])
            os.close(fault_write)
            with open(fault_read, "rb", buffering=0) as faults:
                said = faults.read()
            if said:
                return main, said.removeprefix(_BEGUN)
            os.waitpid(main, 0)
        raise OSError(errno.EAGAIN, "programs inside kill whatever would run a command")

    def _report(self, channel: socket.socket, status: int, kills_before: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):
            wire.send_packet(channel, {"exit": code, "oom": self._jail.oom_kills() > kills_before})


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(1)
    except OSError:
        return b""


def _reap(main: int) -> tuple[int | None, bool]:
    """(wait status of the main process if it just ended, whether no child is left)."""
    found: int | None = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found, False
            if pid == main:
                found = status
    except ChildProcessError:
        return found, True


def descendants(root: int) -> list[int]:
    """All processes below `root`, by the parent links in /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                # The command name may hold anything; the fields after its closing bracket do not.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
                else:
                    children.setdefault(int(parent), [])
    found: list[int] = []
    stack = [root]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def kill_tree(main: int) -> tuple[int | None, bool]:
    """Kill all descendants: stop them first, so that none can fork away, until no new one appears."""
    status: int | None = None
    deadline = time.monotonic() + _KILL_SECONDS
    stopped: set[int] = set()
    while time.monotonic() < deadline - _KILL_SECONDS / 2:
        fresh = [pid for pid in descendants(os.getpid()) if pid not in stopped]
        if not fresh:
            break
        for pid in fresh:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped.update(fresh)
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended, empty = _reap(main)
        status = ended if ended is not None else status
        if empty:
            return status, True
        time.sleep(0.001)
    return status, False


def _await_command(jail: Jail, orders: socket.socket) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        wire.close_all_but({0, 1, 2, orders.fileno(), *jail.payload.files()})
        op, body, fds = wire.receive_request(orders)
        if op:
            os.write(fds[0], _BEGUN)
            _payload(jail, body, fds[1:], fds[0])
    finally:
        os._exit(0)


def _payload(jail: Jail, body: dict[str, Any], fds: list[int], fault: int) -> NoReturn:
    """Become the command. A fault of ours goes to the supervisor; a command that cannot run says so like a shell."""
    try:
        for number in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)  # the program resets what is caught, not what is ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        jail.payload.enter()
        os.setsid()
        stdin = fds[2] if len(fds) > 2 else os.open("/dev/null", os.O_RDONLY)
        for target, fd in enumerate((stdin, fds[0], fds[1])):
            os.dup2(fd, target)
        if body.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _limit(jail)
        uid, gid = jail.credentials(body["user"])
        for fd in fds:
            with suppress(PermissionError):  # where ids are mapped by root, Sandlot gave it to the user
                os.fchown(fd, uid, -1)
        _drop(jail, uid, gid)
        try:
            os.chdir(body["cwd"])
        except OSError as error:
            os.write(fault, os.fsencode(f"cannot enter the directory {body['cwd']}: {error.strerror}"))
            os._exit(126)
        wire.close_all_but({0, 1, 2, fault})
    except BaseException as error:
        os.write(fault, f"could not prepare the command: {error!r}".encode("utf-8", "replace"))
        os._exit(126)
    _exec(body["argv"], body["env"])


def _limit(jail: Jail) -> None:
    limits = jail.spec["limits"]
    wanted = {
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 1,  # keeps the machine's crash handler out as well, which 0 would not
        resource.RLIMIT_FSIZE: limits["disk"],
    }
    if not jail.payload.join:
        wanted[resource.RLIMIT_NPROC] = limits["processes"]
    if jail.spec["cpu_affinity"]:
        cores = sorted(os.sched_getaffinity(0))
        first, count = os.getppid() % len(cores), math.ceil(limits["cpu"])
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(count)})
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop(jail: Jail, uid: int, gid: int) -> None:
    capabilities = ROOT_CAPABILITIES if uid == 0 else 0
    syscalls.drop_bounding_capabilities(capabilities)
    if jail.spec["users"] == "range":
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    syscalls.set_capabilities(capabilities)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # a change of ids may set it; until the program runs this is still ours


def _exec(argv: list[str], env: dict[str, str]) -> NoReturn:
    try:
        _exec_in_path(argv, env)
    except (OSError, ValueError) as error:
        os.write(2, os.fsencode(f"sandlot: cannot run {argv[0]}: {getattr(error, 'strerror', error)}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _exec_in_path(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Like `os.execvpe`, which may import modules: here that would be the image's."""
    name = argv[0]
    refused: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for directory in [""] if "/" in name else env.get("PATH", os.defpath).split(":"):
        try:
            os.execve(os.path.join(directory, name), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refused = error
    raise refused
