"""Runs the tests of one grading and tells of them on its own stdout, which they never hold.

Started as `python3 -I -S run.py`, as root where the sandbox has two users, with one JSON document as its stdin. What it
starts belongs to the tests' user, who can neither signal nor trace this process, nor read its memory. Test sessions
connect to a socket and tell their events there; only this process knows the nonce that a told event carries, and only
it sees how the tests' process ended.
"""

import json
import os
import pwd
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
_PR_SET_DUMPABLE = 4
_LINE = 16 << 20


class Teller:
    """Our stdout: lines `nonce json`. Descriptor 1 is stderr from here on."""

    def __init__(self, nonce: str) -> None:
        self._fd, self._nonce = os.dup(1), nonce
        os.dup2(2, 1)

    def tell(self, **event: Any) -> None:
        # What tests say may have halves of characters in it, which as escapes would come through.
        data = ("\n" + self._nonce + " " + json.dumps(event, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        while data:
            data = data[os.write(self._fd, data) :]


class Talk:
    """One connection of a test session. Lines without its token are nobody's events."""

    def __init__(self, connection: "socket.socket", name: str, teller: "Teller") -> None:
        self.connection, self._name, self._teller = connection, name, teller
        self._token, self._rest = secrets.token_hex(16), b""
        connection.sendall(self._token.encode() + b"\n")
        connection.setblocking(False)

    def hear(self) -> bool:
        """Pass on what was said; whether more may come."""
        while True:
            try:
                data = self.connection.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in filter(None, lines):
                self._pass_on(line)
            if not data or len(self._rest) > _LINE:
                if self._rest:
                    self._teller.tell(event="stray", text="an unfinished line")
                return False

    def _pass_on(self, line: bytes) -> None:
        token, _, told = line.partition(b" ")
        try:
            if token.decode() != self._token:
                raise ValueError("wrong token")
            event = json.loads(told)
            if not isinstance(event["event"], str) or event["event"] in ("end", "stray"):
                raise ValueError("not a session's to tell")
            self._teller.tell(**{**event, "session": self._name + "/" + str(event["session"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            self._teller.tell(event="stray", text=line[:200].decode("utf-8", "backslashreplace"))


class Door:
    """The socket that test sessions connect to. A process may have one session, and what it starts none."""

    def __init__(self, teller: "Teller") -> None:
        self.address = "sandlot-" + secrets.token_hex(8)
        self._teller = teller
        self._seen: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(16)
        self._listener.setblocking(False)
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._wake, self._woken = wake, woken

    def attend(self, child: "subprocess.Popen[bytes]") -> int:
        """Hear the sessions until the child has ended; its exit status as `Popen` has it."""
        while child.poll() is None:
            for key, _ in self._selector.select():
                self._serve(key, child.pid)
        for key in list(self._selector.get_map().values()):  # what was said before the end
            self._serve(key, child.pid)
        return int(child.returncode)

    def _serve(self, key: "selectors.SelectorKey", root: int) -> None:
        if key.fileobj is self._listener:
            with suppress(BlockingIOError):
                while True:
                    self._admit(self._listener.accept()[0], root)
        elif key.fileobj is self._wake:
            with suppress(BlockingIOError):
                self._wake.recv(4096)
        elif not key.data.hear():
            self._selector.unregister(key.fileobj)
            key.data.connection.close()

    def _admit(self, connection: "socket.socket", root: int) -> None:
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        line = [pid]
        while line[-1] not in (root, 0):
            line.append(parent_of(line[-1]))
        if line[-1] != root or self._seen.intersection(line):
            self._teller.tell(event="stray", text="a process that is no test session of the command connected")
            connection.close()
            return
        self._seen.add(pid)
        try:
            talk = Talk(connection, str(len(self._seen)), self._teller)
        except OSError:  # gone again already
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, talk)


def parent_of(pid: int) -> int:
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:  # noqa: UP031
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def close_up() -> None:
    """Let nobody trace this process, read its memory or open its descriptors by name."""
    with suppress(Exception):  # an interpreter may lack the module
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for fd in (0, 1):  # where a sandbox keeps them as files
        with suppress(OSError):
            os.fchmod(fd, 0o600)


def become(user: str) -> "tuple[dict[str, str], Any]":
    """The environment of the tests' user, and what their process calls first to be that user."""
    environment = dict(os.environ)
    if os.geteuid() != 0 or user == "root":
        return environment, None
    entry = pwd.getpwnam(user)

    def drop() -> None:
        os.setgroups([])
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)

    return {**environment, "HOME": entry.pw_dir, "USER": user}, drop


def command_of(task: "dict[str, Any]", environment: "dict[str, str]", address: str) -> "tuple[list[str], bytes]":
    """What to start, and its stdin. Every pytest of a shell command finds the witness in its environment."""
    if task["mode"] != "command":
        return [sys.executable, "-I", os.path.join(HERE, "session.py")], json.dumps(
            {**task, "address": address}
        ).encode()
    old = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([HERE, *([old] if old else [])])
    environment["PYTEST_ADDOPTS"] = "-p sandlot_witness -p no:cacheprovider"
    environment["SANDLOT_WITNESS"] = address
    return list(task["argv"]), b""


def main() -> int:
    close_up()
    task = json.loads(sys.stdin.buffer.read())
    teller = Teller(task.pop("nonce"))
    door = Door(teller)
    environment, drop = become(task.pop("user"))
    argv, given = command_of(task, environment, door.address)
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, env=environment, cwd=task["workdir"], preexec_fn=drop, close_fds=True
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(given)
        child.stdin.close()
    if task["mode"] == "command":
        teller.tell(event="hello", python=sys.version, pytest="")
    status = door.attend(child)
    code = status if status >= 0 else 128 - status
    if status >= 0 or task["mode"] == "command":  # a test runner that was killed came to no end
        teller.tell(event="end", status=code)
    return code


status = 70
try:
    status = main()
except BaseException:
    traceback.print_exc()
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
