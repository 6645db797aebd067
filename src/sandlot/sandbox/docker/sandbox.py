"""One container, seen from Sandlot."""

from __future__ import annotations

import asyncio
import base64
import json
import posixpath
import socket
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.base import AGENT_USER, Layer, SandboxSpec, Snapshot
from sandlot.sandbox.docker import netns
from sandlot.sandbox.remote import scripts
from sandlot.sandbox.remote.process import Stream, new_mark
from sandlot.sandbox.remote.sandbox import AGENT_ID, RemoteSandbox

if TYPE_CHECKING:
    import aiodocker
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream as ExecStream

_KILL_SECONDS = 10.0
_DISK_SECONDS = 15.0
_LINKS = 40
_DIRECTORY, _SYMLINK, _OTHER = 1 << 31, 1 << 27, 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21  # Go's file mode bits
_IDS = {"root": "0:0", AGENT_USER: f"{AGENT_ID}:{AGENT_ID}"}
_SPECIAL = ("/proc/", "/sys/", "/dev/")


class _Exec:
    """See `Stream`."""

    def __init__(self, run: Exec, stream: ExecStream) -> None:
        self._run, self._stream = run, stream

    async def read(self) -> tuple[int, bytes] | None:
        try:
            message = await self._stream.read_out()
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from error
        return None if message is None else (message.stream, message.data)

    async def write(self, data: bytes) -> None:
        await self._stream.write_in(data)

    def skip(self, kind: int) -> None:
        """See `Stream.skip`. It comes all the same."""

    async def exit_code(self) -> int | None:
        with api_errors():
            found = await self._run.inspect()
        return None if found["Running"] else int(found["ExitCode"])

    async def close(self) -> None:
        await self._stream.close()


class DockerSandbox(RemoteSandbox):
    """See `Sandbox`. `pid` is the container's first process on this machine, 0 where the daemon runs elsewhere."""

    def __init__(
        self,
        docker: aiodocker.Docker,
        container: str,
        identity: str,
        spec: SandboxSpec,
        facts: Mapping[str, Any],
        pid: int,
        on_end: Callable[[DockerSandbox], Awaitable[None]],
        freeze: Callable[[DockerSandbox], Awaitable[Snapshot]],
        mounted: tuple[Layer, ...] = (),
    ) -> None:
        super().__init__(identity, spec, facts)
        self._docker, self._pid, self._on_end, self._freeze = docker, pid, on_end, freeze
        self.mounted = mounted
        self.container = docker.containers.container(container)
        self._memory_file: Path | None = netns.memory_kills_file(pid) if pid else None
        self._memory_kills = netns.memory_kills(self._memory_file)
        self._disk = asyncio.create_task(self._watch_disk())

    async def _open(self, argv: Sequence[str], *, user: str, env: Mapping[str, str], stdin: bytes) -> Stream:
        return await self._run(argv, user, env, bool(stdin))

    async def _stream(self, argv: Sequence[str]) -> Stream:
        return await self._run(argv, "root", {scripts.MARK: new_mark()}, True)

    async def _run(self, argv: Sequence[str], user: str, env: Mapping[str, str], stdin: bool) -> Stream:
        try:
            with api_errors():
                run = await self.container.exec(
                    argv, stdout=True, stderr=True, stdin=stdin, user=_IDS[user], environment=env, workdir="/"
                )
                stream = run.start(detach=False)
                await stream._init()  # the command runs from here on
        except SandboxError as error:
            await self._find_out(error)
            raise
        return _Exec(run, stream)

    async def _find_out(self, error: SandboxError) -> None:
        """Whether a call failed because the container is gone."""
        if (reason := await self.why_lost()) is not None:
            raise SandboxLostError(f"the sandbox is gone: {reason}") from error

    async def why_lost(self) -> str | None:
        """See `Owner.why_lost`."""
        if self._reason is None:
            try:
                state = (await self.container.show())["State"]
                self._reason = None if state["Running"] else f"its first process ended with {state.get('ExitCode')}"
            except Exception as unknown:  # whatever the daemon says, the first error is the better one
                self._reason = "its container is gone" if getattr(unknown, "status", 0) == 404 else None
        return self._reason

    async def out_of_memory(self, code: int) -> bool:
        """See `Owner.out_of_memory`; known where the daemon runs on this machine."""
        before, self._memory_kills = self._memory_kills, netns.memory_kills(self._memory_file)
        return self._memory_kills > before

    async def _kill_all(self) -> None:
        # The container's first shell does it, which no fork bomb can keep from it.
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline:
            with api_errors():
                await self.container.kill(signal="SIGUSR1")
                for _ in range(5):
                    if await self._process_count() <= 2:
                        return
                    await asyncio.sleep(0.02)
        raise SandboxError(f"some processes did not die within {_KILL_SECONDS:g} s; kill the sandbox")

    async def _process_count(self) -> int:
        async with self._docker._query(f"containers/{self.container.id}/top", method="GET") as response:
            return len(json.loads(await response.read())["Processes"])

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See `Sandbox.read_file`. The daemon reads it, with no program of the image."""
        asked = path = self._absolute(path)
        for _ in range(_LINKS):
            status = await self._status(path)
            if not status["mode"] & _SYMLINK:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), status["linkTarget"]))
        if status["mode"] & (_DIRECTORY | _SYMLINK | _OTHER) or f"{path}/".startswith(_SPECIAL):
            raise SandboxError(f"{asked} is not a regular file", retryable=False)
        if status["size"] > max_bytes:
            raise SandboxError(f"{asked} is larger than {max_bytes} bytes", retryable=False)
        data = bytearray()
        async with self._archive(path) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > max_bytes + (64 << 10):  # headers
                    raise SandboxError(f"{asked} is larger than {max_bytes} bytes", retryable=False)
        return await asyncio.to_thread(_only_file, bytes(data), asked, max_bytes)

    async def _status(self, path: str) -> dict[str, Any]:
        self._check_alive()
        url = self._docker._canonicalize_url(self._archive_url)
        with api_errors():
            async with self._docker.session.head(url, params={"path": path}) as response:
                status, header = response.status, response.headers.get("X-Docker-Container-Path-Stat", "")
        if status == 404:
            missing = SandboxError(f"{path} is not there")
            await self._find_out(missing)
            raise FileNotFoundError(2, "No such file or directory in the sandbox", path)
        if status != 200:
            raise SandboxError(f"{path} cannot be read: the daemon says HTTP {status}", retryable=False)
        found: dict[str, Any] = json.loads(base64.b64decode(header))
        return found

    @asynccontextmanager
    async def _archive(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        with api_errors():
            async with self._docker._query(self._archive_url, method="GET", params={"path": path}) as response:
                yield response.content.iter_chunked(1 << 18)

    @property
    def _archive_url(self) -> str:
        return f"containers/{self.container.id}/archive"

    def listen(self, port: int) -> socket.socket:
        """See `Sandbox.listen`. Where the container's network cannot be entered from here, a relay is used."""
        if self.spec.network != "gateway" or self._pid == 0:
            return super().listen(port)
        self._check_alive()
        return netns.listen(self._pid, port)

    async def snapshot(self) -> Snapshot:
        """See `Sandbox.snapshot`."""
        self._check_alive()
        await self.kill_processes()
        try:
            return await self._freeze(self)
        finally:
            await self.kill()

    async def _watch_disk(self) -> None:
        """Kill all processes when the container's files are over the limit."""
        while True:
            await asyncio.sleep(_DISK_SECONDS)
            with suppress(Exception):  # a look that fails is made again
                found = await self.container.show(size="true")
                if int(found.get("SizeRw") or 0) > self.spec.limits.disk:
                    await self.kill_processes()

    async def _destroy(self) -> None:
        self._disk.cancel()
        try:
            with api_errors():
                await self.container.delete(force=True, v=True)
        except SandboxError as error:
            if getattr(error.__cause__, "status", 0) not in (404, 409):
                raise
        finally:
            await self._on_end(self)


class api_errors:
    """Turn the client's errors into ours."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, aiohttp.ClientError | OSError) and not isinstance(error, FileNotFoundError):
            raise SandboxError(f"the Docker daemon does not answer: {error}") from error
        if error is not None and any(one.__name__ == "DockerError" for one in type(error).__mro__):
            status = getattr(error, "status", 0)
            raise SandboxError(
                f"the Docker daemon refuses (HTTP {status}): {getattr(error, 'message', error)}",
                retryable=status >= 500,
            ) from error


def _only_file(data: bytes, path: str, max_bytes: int) -> bytes:
    import io

    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            member = archive.next()
            content = archive.extractfile(member) if member is not None and member.isreg() else None
            if content is None:
                raise SandboxError(f"{path} is not a regular file", retryable=False)
            found = content.read(max_bytes + 1)
    except tarfile.TarError as error:
        raise SandboxError(f"the daemon sent a damaged archive of {path}: {error}") from error
    if len(found) > max_bytes:
        raise SandboxError(f"{path} is larger than {max_bytes} bytes", retryable=False)
    return found
