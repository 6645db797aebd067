"""What is particular about containers: what the daemon is told, what is left, and who sweeps it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import sandlot
from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.docker import DockerBackend
from sandlot.sandbox.remote import owner
from support.backends import HostImage, docker_backend, podman_host

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend() -> AsyncIterator[HostImage]:
    made, clean = await docker_backend()
    yield made
    await clean()
    await made.close()


async def _containers(backend: Any) -> list[str]:
    docker = await backend._client()
    return [one.id for one in await docker.containers.list(all=True, filters={"label": [owner.MINE]})]


async def test_limits_are_told_to_the_daemon(backend: HostImage) -> None:
    limits = Limits(memory=200 << 20, processes=77, cpu=0.5, open_files=300, disk=1 << 30)
    async with await backend.create(SandboxSpec(limits=limits, labels={"run": "r1"})) as sandbox:
        found = await sandbox.container.show()  # type: ignore[attr-defined]
        host = found["HostConfig"]
        assert (host["Memory"], host["PidsLimit"], host["CpuQuota"]) == (200 << 20, 77, 50_000)
        assert host["NetworkMode"] == "none"
        seen = await sandbox.exec("ulimit -n; ulimit -c; ls /sys/class/net; id -u")
        assert seen.stdout == b"300\n0\nlo\n1000\n"
        (listed,) = await backend.running()
        assert (listed.id, dict(listed.labels)) == (sandbox.id, {"run": "r1"})
        assert listed.owner == f"process {os.getpid()}"
    assert await _containers(backend) == []


async def test_memory_and_processes_are_bounded(backend: HostImage) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(memory=128 << 20, processes=64))) as sandbox:
        hog = await sandbox.exec(["python3", "-c", "x = bytearray()\nwhile True: x += bytes(4 << 20)"], timeout=60)
        assert hog.exit_code is None
        assert hog.out_of_memory
        assert not (await sandbox.exec(["false"])).out_of_memory
        bomb = await sandbox.spawn(["bash", "-c", "f() { f | f & }; f; while :; do f; done"])
        await asyncio.sleep(1.0)
        await sandbox.kill_processes()
        assert (await bomb.wait(20)).exit_code is None
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_the_wall_clock_ends_it(backend: HostImage) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(wall_clock=1.5)))
    with pytest.raises(SandboxLostError, match="wall clock"):
        await sandbox.exec(["sleep", "60"], timeout=None)
    await sandbox.kill()
    assert await _containers(backend) == []


async def test_a_container_that_was_removed_is_lost(backend: HostImage) -> None:
    async with await backend.create(SandboxSpec()) as sandbox:
        await sandbox.container.delete(force=True)  # type: ignore[attr-defined]
        with pytest.raises(SandboxLostError, match="container is gone"):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxLostError):
            await sandbox.read_file("/etc/passwd")


async def test_a_cancelled_create_leaves_nothing(backend: HostImage) -> None:
    for delay in (0.05, 0.2):
        task = asyncio.ensure_future(backend.create(SandboxSpec()))
        await asyncio.sleep(delay)
        task.cancel()
        try:
            await (await task).kill()
        except asyncio.CancelledError:
            pass
    for _ in range(100):
        if not await _containers(backend):
            break
        await asyncio.sleep(0.1)
    assert await _containers(backend) == []


async def test_eight_at_once(backend: HostImage) -> None:
    made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(8)))
    results = await asyncio.gather(*(one.exec(f"echo {n} > n; cat n") for n, one in enumerate(made)))
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(8)]
    await asyncio.gather(*(one.kill() for one in made))
    assert await _containers(backend) == []


OWNER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.docker import DockerBackend
from support.backends import HostImage

async def main():
    backend = HostImage(DockerBackend(sys.argv[2]), sys.argv[3])
    await backend.create(SandboxSpec())
    first = await backend.create(SandboxSpec())
    await first.snapshot()
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_what_a_killed_owner_left_is_swept_and_nothing_else(backend: HostImage) -> None:
    source = [str(Path(sandlot.__file__).parents[1]), *filter(None, sys.path)]
    arguments = [str(Path(__file__).parents[1]), await asyncio.to_thread(podman_host), backend._image]
    async with await backend.create(SandboxSpec()) as alive:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", OWNER, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(source)},
            capture_output=True,
        )
        assert done.returncode == -9, done.stderr.decode()
        assert len(await _containers(backend)) == 2
        assert await backend.sweep() == 1
        assert len(await _containers(backend)) == 1
        images = await (await backend._client()).images.list(filters={"label": [owner.MINE]})
        assert not [i for i in images if any("sandlot-snapshot" in tag for tag in i.get("RepoTags") or [])]
        assert (await alive.exec("echo alive")).stdout == b"alive\n"


async def test_what_cannot_be_done_is_refused(backend: HostImage) -> None:
    inner = backend.inner
    for spec in (SandboxSpec(), SandboxSpec(image="/var/tmp"), SandboxSpec(image="localhost:9/none", workdir="/w")):
        with pytest.raises(SandboxUnavailableError):
            await inner.create(spec)
    nobody = DockerBackend("unix:///does/not/exist.sock")
    with pytest.raises(SandboxError, match="daemon"):
        await nobody.create(SandboxSpec(image="x"))
    (check,) = await nobody.doctor()
    assert not check.ok
    assert "DOCKER_HOST" in check.cure
    await nobody.close()


async def test_whose_a_container_is() -> None:
    mine = owner.labels(60)
    assert not owner.is_dead(mine)
    pid = await asyncio.create_subprocess_exec("true")
    await pid.wait()
    assert owner.is_dead({**mine, "sandlot.owner": f"{pid.pid}-1"})
    assert not owner.is_dead({**mine, "sandlot.owner": "1-1", "sandlot.machine": "another"})
    assert owner.is_dead({**mine, "sandlot.machine": "another", "sandlot.until": "1000"})
    assert not owner.is_dead({})
