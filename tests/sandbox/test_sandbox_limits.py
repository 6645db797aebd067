"""Bounds hold, the sandbox outlives whoever hit them, and the next command runs."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandlot.errors import SandboxLostError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.base import Limits
from sandlot.sandbox.local import LocalBackend, limits

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["best", "rlimits"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[LocalBackend]:
    """With the best tier of this machine, and with the one that every machine has."""
    made = LocalBackend()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "rlimits":
            patch.setattr(limits, "detect", lambda: limits.RLIMITS)
        elif limits.detect() == limits.RLIMITS:
            pytest.skip("no limit groups here")
        await (await made.create(SandboxSpec())).kill()
    yield made
    await made.close()


async def test_memory_of_one_process(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(memory=128 << 20))) as sandbox:
        hog = "x = bytearray()\nwhile True: x += bytes(4 << 20)"
        result = await sandbox.exec(["python3", "-c", hog], timeout=30)
        assert result.exit_code is None
        assert result.out_of_memory
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        assert not (await sandbox.exec(["false"])).out_of_memory


async def test_memory_of_all_processes_together(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(memory=128 << 20))) as sandbox:
        part = "import time; x = bytearray(50 << 20); time.sleep(4)"
        result = await sandbox.exec(f"for i in 1 2 3 4 5; do python3 -c '{part}' & done; wait; exit 9", timeout=30)
        assert result.out_of_memory
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_memory_of_files_in_memory(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(memory=128 << 20))) as sandbox:
        assert not (await sandbox.exec("head -c 300000000 /dev/zero > /dev/shm/full", timeout=30)).ok
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        for _ in range(3):
            assert (await sandbox.exec(["python3", "-c", "x = bytearray(30 << 20)"])).ok


async def test_a_fork_bomb(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(processes=100))) as sandbox:
        bomb = await sandbox.spawn(["bash", "-c", "f() { f | f & }; f; while :; do f; done"])
        await asyncio.sleep(0.5)
        started = time.monotonic()
        assert (await sandbox.exec("echo works", user="agent")).stdout == b"works\n"
        assert len((await sandbox.exec(["ls", "/proc"])).stdout.split()) < 260
        await sandbox.kill_processes()
        assert int((await sandbox.exec("ls -d /proc/[0-9]* | wc -l")).stdout) < 10
        assert time.monotonic() - started < 20
        assert (await bomb.wait(5)).exit_code is None


async def test_disk(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(disk=64 << 20))) as sandbox:
        one = await sandbox.exec("head -c 100000000 /dev/zero > one")
        assert not one.ok
        await sandbox.exec("rm one")
        fill = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > f$i; sleep 0.02; done"
        many = await sandbox.exec(fill, timeout=60)
        assert many.exit_code is None
        assert not many.timed_out
        assert (await sandbox.exec("rm -f f*; echo alive")).stdout == b"alive\n"


async def test_open_files(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(open_files=64))) as sandbox:
        result = await sandbox.exec(["python3", "-c", "f = [open('/dev/null') for _ in range(100)]"])
        assert b"Too many open files" in result.stderr


async def test_cpu(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(cpu=0.5))) as sandbox:
        assert sandbox.facts["limits"]["cpu"] in ("group", "affinity")
        spin = "import time; s = time.monotonic()\nwhile time.monotonic() - s < 1: pass\nprint(time.process_time())"
        result = await sandbox.exec(f"for i in 1 2; do python3 -c '{spin}' & done; wait")
        used = sum(map(float, result.stdout.split()))
        assert used < (0.9 if sandbox.facts["limits"]["cpu"] == "group" else 1.3)


async def test_wall_clock(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(wall_clock=0.8)))
    started = time.monotonic()
    with pytest.raises(SandboxLostError, match="wall clock"):
        await sandbox.exec(["sleep", "90"], timeout=None)
    assert time.monotonic() - started < 30
    with pytest.raises(SandboxLostError, match="wall clock"):
        await sandbox.read_file("/etc/hostname")
    await sandbox.kill()


async def test_one_long_line_costs_no_memory_here(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(output=1 << 16))) as sandbox:
        result = await sandbox.exec("head -c 300000000 /dev/zero | tr '\\0' x", timeout=60)
        assert result.truncated
        assert result.stdout == b"x" * (1 << 16)
