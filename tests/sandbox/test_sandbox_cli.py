"""`sandlot sandbox`, run as a command: scripts, a real terminal, listing and sweeping."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandlot.sandbox import Lists, SandboxSpec, Terminals
from sandlot.sandbox.local import LocalBackend

SANDLOT = [sys.executable, "-m", "sandlot.cli"]


def _sandlot(*arguments: str, stdin: bytes = b"", cache: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    env = os.environ | ({"XDG_CACHE_HOME": str(cache)} if cache else {})
    return subprocess.run([*SANDLOT, "sandbox", *arguments], input=stdin, capture_output=True, timeout=60, env=env)


def test_a_script_on_stdin() -> None:
    done = _sandlot("shell", "host", stdin=b"whoami; pwd; echo oops >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"agent\n/workspace\n", b"oops\n")


def test_a_command() -> None:
    done = _sandlot("shell", "--user", "root", "-c", "ls /proc | grep -c '^1$'; kill -9 $$")
    assert (done.returncode, done.stdout) == (137, b"1\n")


def test_an_unknown_image_is_one_line() -> None:
    done = _sandlot("shell", "no/such/image")
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


def _until(terminal: int, text: bytes, seconds: float = 20.0) -> bytes:
    said = b""
    deadline = time.monotonic() + seconds
    while text not in said:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"{text!r} did not come; there is {said!r}")
        try:
            said += os.read(terminal, 4096)
        except OSError:
            pytest.fail(f"the terminal closed before {text!r}; there is {said!r}")
    return said


def test_a_shell_on_a_terminal() -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [*SANDLOT, "sandbox", "shell", "host"])
    try:
        _until(terminal, b"$ ")
        os.write(terminal, b"id -un; tty; echo to the terminal > /dev/tty\n")
        said = _until(terminal, b"\r\nto the terminal\r\n")
        assert b"agent\r\n/dev/pts/0\r\n" in said
        os.write(terminal, b"sleep 100\n")
        _until(terminal, b"sleep 100\r\n")
        time.sleep(0.2)
        os.write(terminal, b"\x03")  # reaches the sandbox's job, not ours
        _until(terminal, b"$ ")
        os.write(terminal, b"exit 7\n")
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
    finally:
        os.close(terminal)


async def test_list_sees_other_processes_and_sweep_spares_them(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "sandlot" / "sandboxes")
    assert isinstance(backend, Lists)
    async with await backend.create(SandboxSpec(labels={"run": "r1"})) as sandbox:
        assert isinstance(sandbox, Terminals)
        (found,) = json.loads(_sandlot("list", "--json", cache=tmp_path).stdout)
        assert (found["id"], found["image"], found["labels"]) == (sandbox.id, "host", {"run": "r1"})
        assert found["owner"] == f"process {os.getpid()}"
        assert abs(found["started"] - time.time()) < 60
        assert json.loads(_sandlot("sweep", "--json", cache=tmp_path).stdout) == {"removed": 0}
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        assert sandbox.id.encode() in _sandlot("list", cache=tmp_path).stdout
    assert await backend.running() == []
    await backend.close()


async def test_sweep_removes_a_dead_run(tmp_path: Path) -> None:
    dead = tmp_path / "sandlot" / "sandboxes" / "run-1-1-abc"
    (dead / "1-beef" / "upper").mkdir(parents=True)
    (dead / ".lock").touch()
    assert json.loads(_sandlot("list", "--json", cache=tmp_path).stdout) == []
    assert json.loads(_sandlot("sweep", "--json", cache=tmp_path).stdout) == {"removed": 1}
    assert not dead.exists()
