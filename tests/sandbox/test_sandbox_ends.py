"""What holds in every backend about ends, bounds and neighbours; what one alone can promise has a module of its own."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandlot.errors import SandboxLostError
from sandlot.sandbox import Limits, Sandbox, SandboxBackend, SandboxSpec
from support.backends import EVERYWHERE

BACKENDS = EVERYWHERE
pytestmark = pytest.mark.asyncio(loop_scope="module")

HARD_TO_KILL = (
    "(setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 91.5; done' &); sleep 91.5 & kill -STOP $!; "
    'python3 -c \'import os, time\nos.fork() or (os.setsid(), os.fork())\nopen("up", "w")\ntime.sleep(91.5)\''
)


async def test_kill_processes_kills_what_resists_and_the_sandbox_works_on(backend: SandboxBackend) -> None:
    async with await backend.create(SandboxSpec()) as sandbox:
        spawned = await sandbox.spawn(HARD_TO_KILL)
        running = asyncio.ensure_future(sandbox.exec("touch too; sleep 91.5", timeout=None))
        await sandbox.exec("until [ -e up ] && [ -e too ]; do sleep 0.05; done")
        await sandbox.kill_processes()
        assert (await running).exit_code is None
        assert (await spawned.wait(60)).exit_code is None
        assert b"91.5" not in (await sandbox.exec("ps axww | grep -v grep")).stdout
        assert (await sandbox.exec("ls; echo works")).stdout == b"too\nup\nworks\n"


async def test_an_end_may_come_twice_and_breaks_what_runs(backend: SandboxBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    running = asyncio.ensure_future(sandbox.exec("touch up; sleep 91.5", timeout=None))
    await sandbox.exec("until [ -e up ]; do sleep 0.05; done")
    await asyncio.gather(sandbox.kill(), sandbox.kill())
    with pytest.raises(SandboxLostError):
        await running
    await sandbox.kill()
    for call in (sandbox.exec(["true"]), sandbox.read_file("/etc/hostname"), sandbox.write_file("x", b"")):
        with pytest.raises(SandboxLostError, match="killed"):
            await call


async def test_the_wall_clock_ends_it(backend: SandboxBackend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(wall_clock=2.0)))
    started = time.monotonic()
    with pytest.raises(SandboxLostError, match="wall clock"):
        await sandbox.exec(["sleep", "91"], timeout=None)
    assert time.monotonic() - started < 60
    await sandbox.kill()


async def test_open_files_and_core_dumps_are_bounded(backend: SandboxBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(open_files=64))) as sandbox:
        result = await sandbox.exec(["python3", "-c", "f = [open('/dev/null') for _ in range(100)]"])
        assert b"Too many open files" in result.stderr
        assert (await sandbox.exec("ulimit -c")).stdout == b"0\n"


async def test_the_agent_has_no_power_over_root(sandbox: Sandbox) -> None:
    if sandbox.facts["users"] == "single":
        pytest.skip("one user only")
    await sandbox.write_file("/opt/secret", b"of root", mode=0o600, user="root")
    daemon = await sandbox.spawn("touch /tmp/up; exec sleep 91.5", user="root")
    await sandbox.exec("until [ -e /tmp/up ]; do sleep 0.05; done")
    tried = await sandbox.exec(
        "cat /opt/secret; kill -9 $(ps axww -o pid,args | awk '/[s]leep 91.5/{print $1}'); echo x >/etc/passwd; id -u"
    )
    assert tried.stdout.strip() not in (b"", b"0")
    assert b"of root" not in tried.stdout
    assert tried.stderr.count(b"ermi") >= 3, tried.stderr  # permission, Permission, permitted
    assert daemon.running
    await daemon.kill()


async def test_neighbours_do_not_meet(backend: SandboxBackend) -> None:
    async with await backend.create(SandboxSpec()) as one, await backend.create(SandboxSpec()) as other:
        await one.exec("echo 1 >mine; echo 1 >/tmp/mine")
        other_sleeps = await other.spawn("sleep 92.5")
        assert (await other.exec("ls mine /tmp/mine 2>/dev/null")).stdout == b""
        seen = await one.exec("ps axww | grep -v grep | grep -c 'sleep 92[.]5'; kill -9 -1 2>/dev/null; true")
        assert seen.stdout.strip() in (b"0", b"")
        assert other_sleeps.running
        await other_sleeps.kill()


async def test_no_network_leads_out(sandbox: Sandbox) -> None:
    code = """
import socket
for family, address in ((2, ("127.0.0.1", 80)), (2, ("169.254.169.254", 80)), (2, ("1.1.1.1", 53)), (10, ("::1", 80))):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.settimeout(2)
            tried.connect(address)
        print("out", address)
    except OSError:
        pass
"""
    result = await sandbox.exec(["python3", "-c", code])
    assert (result.exit_code, result.stdout) == (0, b""), result.text()
