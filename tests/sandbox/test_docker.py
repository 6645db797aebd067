"""What is particular about containers: what the daemon is told, what is left, and who sweeps it."""

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiodocker.exceptions import DockerError

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.docker import DockerBackend, build
from sandlot.sandbox.remote import owner
from support.backends import MAKER, podman_host
from support.image_files import Entry, directory, make_tar

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend() -> AsyncIterator[DockerBackend]:
    made = DockerBackend(await asyncio.to_thread(podman_host))
    yield made
    await made.close()


async def _containers(backend: DockerBackend, maker: str = MAKER) -> list[str]:
    """Containers of this process, or of another's; more processes than this one use the daemon."""
    docker = await backend._client()
    labels = [owner.MINE, f"sandlot.owner={maker}"]
    return [one.id for one in await docker.containers.list(all=True, filters={"label": labels})]


async def test_limits_are_told_to_the_daemon(backend: DockerBackend) -> None:
    limits = Limits(memory=200 << 20, processes=77, cpu=0.5, open_files=300, disk=1 << 30)
    async with await backend.create(SandboxSpec(limits=limits, labels={"run": "r1"})) as sandbox:
        found = await sandbox.container.show()
        host = found["HostConfig"]
        assert (host["Memory"], host["PidsLimit"], host["CpuQuota"]) == (200 << 20, 77, 50_000)
        assert host["NetworkMode"] == "none"
        seen = await sandbox.exec("ulimit -n; ulimit -c; ls /sys/class/net; id -u")
        assert seen.stdout == b"300\n0\nlo\n1000\n"
        (listed,) = [one for one in await backend.running() if one.owner == f"process {os.getpid()}"]
        assert (listed.id, dict(listed.labels)) == (sandbox.id, {"run": "r1"})
    assert await _containers(backend) == []


async def test_memory_and_processes_are_bounded(backend: DockerBackend) -> None:
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


async def test_a_container_that_was_removed_is_lost(backend: DockerBackend) -> None:
    async with await backend.create(SandboxSpec()) as sandbox:
        await sandbox.container.delete(force=True)
        with pytest.raises(SandboxLostError, match="container is gone"):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxLostError):
            await sandbox.read_file("/etc/passwd")


async def test_a_cancelled_create_leaves_nothing_once_the_backend_is_closed(backend: DockerBackend) -> None:
    another = DockerBackend(backend._host)
    for delay in (0.05, 0.2):
        task = asyncio.ensure_future(another.create(SandboxSpec()))
        await asyncio.sleep(delay)
        task.cancel()
        try:
            await (await task).kill()
        except asyncio.CancelledError:
            pass
    await another.close()
    assert await _containers(backend) == []


async def test_the_first_eight_of_a_backend_are_alike(backend: DockerBackend) -> None:
    fresh = DockerBackend(backend._host)  # it has yet to ask what daemon this is
    made = await asyncio.gather(*(fresh.create(SandboxSpec()) for _ in range(8)))
    shown = await asyncio.gather(*(one.container.show() for one in made))
    assert len({tuple(one["HostConfig"]["SecurityOpt"]) for one in shown}) == 1
    results = await asyncio.gather(*(one.exec(f"echo {n} > n; cat n") for n, one in enumerate(made)))
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(8)]
    await fresh.close()
    assert await _containers(backend) == []


OWNER = """
import asyncio, os, sys
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.docker import DockerBackend
from sandlot.sandbox.remote import owner

async def main():
    backend = DockerBackend(sys.argv[1])
    await backend.create(SandboxSpec())
    first = await backend.create(SandboxSpec())
    snapshot = await first.snapshot()
    print(owner.labels(0)["sandlot.owner"], snapshot.image, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_what_a_killed_owner_left_is_swept_and_nothing_else(backend: DockerBackend) -> None:
    host = await asyncio.to_thread(podman_host)
    await backend.sweep()  # what other runs left on this machine
    async with await backend.create(SandboxSpec()) as alive:
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", OWNER, host], capture_output=True, text=True
        )
        assert done.returncode == -9, done.stderr
        maker, image = done.stdout.split()
        docker = await backend._client()
        assert len(await _containers(backend, maker)) == 1
        await docker.images.inspect(image)
        assert await backend.sweep() == 1
        assert await _containers(backend, maker) == []
        with pytest.raises(DockerError):
            await docker.images.inspect(image)
        assert (await alive.exec("echo alive")).stdout == b"alive\n"


async def test_what_cannot_be_done_is_refused(backend: DockerBackend) -> None:
    for spec in (SandboxSpec(image="/var/tmp"), SandboxSpec(image="localhost:9/none", workdir="/w")):
        with pytest.raises(SandboxUnavailableError):
            await backend.create(spec)
    nobody = DockerBackend("unix:///does/not/exist.sock")
    with pytest.raises(SandboxError, match="daemon"):
        await nobody.create(SandboxSpec(image="x"))
    assert [check.name for check in await backend.doctor()] == ["docker", "docker boots"]
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


async def test_a_container_out_of_reach_gets_a_relay(backend: DockerBackend) -> None:
    async with await backend.create(SandboxSpec(network="gateway")) as sandbox:
        sandbox._pid = 0  # as of a daemon elsewhere
        listener = sandbox.listen(8400)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readline()) * 100_000)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, sock=listener):
            ask = "exec 3<>/dev/tcp/127.0.0.1/8400 && echo hello >&3 && cat <&3 | wc -c"
            for _ in range(2):
                assert (await sandbox.exec(["bash", "-c", ask])).stdout == b"600000\n"
            nobody_else = "exec 3<>/dev/tcp/127.0.0.1/8401"
            assert not (await sandbox.exec(["bash", "-c", nobody_else])).ok
            await sandbox.kill_processes()  # the relay too; it comes back
            again = f"while ! ( {ask} ) 2>/dev/null; do sleep 0.05; done"
            assert (await sandbox.exec(["bash", "-c", again])).stdout == b"600000\n"


TOOLS = ("sh", "cat", "chmod", "chown", "env", "grep", "head", "id", "mkdir", "mv", "readlink", "rm", "sleep", "tar")


def _programs() -> bytes:
    """A root file system with a shell and a few programs of this machine, as a tar."""
    files = {Path(found) for tool in TOOLS if (found := shutil.which(tool))}
    linked = subprocess.run(["ldd", *files], capture_output=True, text=True, check=True).stdout
    files |= {Path(word) for word in linked.split() if word.startswith("/") and not word.endswith(":")}
    content = {f"usr/{str(file).removeprefix('/usr')[1:]}": file.resolve().read_bytes() for file in files}
    merged: list[Entry] = [(name, f"usr/{name}") for name in ("bin", "lib", "lib64")]
    return make_tar([("tmp", directory(0o1777)), *merged, *content.items()])


async def test_an_image_is_built_of_a_dockerfile_once(backend: DockerBackend, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)  # the daemon keeps what it built
    (tmp_path / "rootfs.tar").write_bytes(await asyncio.to_thread(_programs))
    (tmp_path / "mark").write_text(mark)
    (tmp_path / "link").symlink_to("/etc/shadow")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        "FROM scratch\nADD rootfs.tar /\nCOPY mark /srv/mark\nRUN cat /srv/mark >/srv/copy\nENV OF_THE_IMAGE=1\n"
    )
    spec = SandboxSpec(image=f"dockerfile:{tmp_path}")
    async with await backend.create(spec) as sandbox:
        result = await sandbox.exec("cat /srv/copy; echo; echo $OF_THE_IMAGE; id -u; pwd")
        assert result.stdout.decode() == f"{mark}\n1\n1000\n/workspace\n", result.text()
    docker = await backend._client()
    built = {image["Id"] for image in await docker.images.list()}
    os.utime(tmp_path / "mark", (1, 1))
    async with await backend.create(spec):
        assert {image["Id"] for image in await docker.images.list()} <= built

    dockerfile.write_text("FROM scratch\nADD rootfs.tar /\nRUN echo the reason; exit 3\n")
    with pytest.raises(SandboxUnavailableError, match=r"(?s)Dockerfile cannot be built: .*its log ends:.*the reason"):
        await backend.create(spec)
    dockerfile.write_text("FROM scratch\nCOPY mark /\n")
    with pytest.raises(SandboxUnavailableError, match="cannot run /bin/sh"):
        await backend.create(spec)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SandboxUnavailableError, match="FIFO"):
        await backend.create(spec)
    (tmp_path / "fifo").unlink()
    dockerfile.unlink()
    with pytest.raises(SandboxUnavailableError, match="no Dockerfile"):
        await backend.create(spec)
    dockerfile.symlink_to("/etc/passwd")
    with pytest.raises(SandboxUnavailableError, match="no Dockerfile"):
        await backend.create(spec)


async def test_too_much_to_build_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(SandboxUnavailableError, match="1024 MiB"), (tmp_path / "context").open("w+b") as context:
        build.pack(str(tmp_path), context)
