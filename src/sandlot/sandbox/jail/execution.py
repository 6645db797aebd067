"""Running one command: the payload's hardening, and the supervisor that holds its whole tree together.

The supervisor is the subreaper of everything the command starts, so daemons and double forks stay its descendants and
can be found and killed. It reports the command's end on its channel and takes orders there: `k` kills the tree, `r`
lets what is left run on as daemons of the sandbox, and the channel's end kills.
"""

from __future__ import annotations

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

from sandlot.sandbox.jail import seccomp, syscalls, wire

if TYPE_CHECKING:
    from sandlot.sandbox.jail.init import Jail

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, setfcap
_ROOT_CAPABILITIES = sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 10, 31))
_KILL_SECONDS = 3.0


def supervise(jail: Jail, channel: socket.socket, body: dict[str, Any], fds: list[int]) -> None:
    """Start the command of `body` with `fds` (stdout, stderr, and stdin if given) and stay until its tree ends."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    kills_before = jail.oom_kills()
    fault_read, fault_write = os.pipe2(os.O_CLOEXEC)
    main = os.fork()
    if main == 0:
        _payload(jail, body, fds, fault_write)
    os.close(fault_write)
    for fd in fds:
        os.close(fd)
    if fault := os.read(fault_read, 2000):
        wire.send_packet(channel, {"error": fault.decode("utf-8", "replace"), "errno": None})
        return
    os.close(fault_read)
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    reported = False
    while True:
        status, empty = _reap(main)
        if status is not None:
            _report(jail, channel, status, kills_before)
            reported = True
        if empty:
            return
        ready = {fd for fd, _ in poller.poll()}
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if channel.fileno() in ready:
            order = _receive(channel)
            if order == b"r":
                return
            status, all_dead = kill_tree(main)
            if status is not None and not reported:
                _report(jail, channel, status, kills_before)
            if not all_dead:
                wire.send_packet(channel, {"escaped": True})
            return


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(1)
    except OSError:
        return b""


def _report(jail: Jail, channel: socket.socket, status: int, kills_before: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    with suppress(OSError):
        wire.send_packet(channel, {"exit": code, "oom": jail.oom_kills() > kills_before})


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


def _payload(jail: Jail, body: dict[str, Any], fds: list[int], fault: int) -> NoReturn:
    """Become the command. A fault of ours goes to the supervisor; a command that cannot run says so like a shell."""
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        jail.payload.enter()
        os.setsid()
        stdin = fds[2] if len(fds) > 2 else os.open("/dev/null", os.O_RDONLY)
        for target, fd in enumerate((stdin, fds[0], fds[1])):
            os.dup2(fd, target)
        if body.get("terminal"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _limit(jail)
        _drop(jail, *jail.credentials(body["user"]))
        try:
            os.chdir(body["cwd"])
        except OSError as error:
            os.write(fault, os.fsencode(f"cannot enter the directory {body['cwd']}: {error.strerror}"))
            os._exit(126)
        syscalls.install_filter(seccomp.build_filter())
        _close_from(3, fault)
    except BaseException as error:
        os.write(fault, f"could not prepare the command: {error!r}".encode("utf-8", "replace"))
        os._exit(126)
    _exec(body["argv"], body["env"])


def _limit(jail: Jail) -> None:
    limits = jail.spec["limits"]
    wanted = {
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
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
    capabilities = _ROOT_CAPABILITIES if uid == 0 else 0
    syscalls.drop_bounding_capabilities(capabilities)
    if jail.spec["users"] == "range":
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    syscalls.set_capabilities(capabilities)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)


def _close_from(first: int, keep: int) -> None:
    os.closerange(first, keep)
    os.closerange(keep + 1, 1 << 16)


def _exec(argv: list[str], env: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        os.write(2, os.fsencode(f"sandlot: cannot run {argv[0]}: {getattr(error, 'strerror', error)}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
