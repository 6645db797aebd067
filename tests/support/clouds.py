"""A cloud of sandboxes of the local backend, behind the servers of clouds' wires."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

from sandlot.sandbox import Sandbox, SandboxBackend, SandboxSpec, Snapshot
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox
from support.piped import Piped


class Gone(Exception):
    """There is no such sandbox."""


@dataclass
class Cloud:
    """What all clouds share: the sandboxes that run, what they were created with, and every call made.

    `tunnel_port`: a port of this machine that sandboxes reach under the same number.
    """

    local: LocalBackend
    tunnel_port: int = 0
    running: dict[str, Sandbox] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    fail_next: Exception | None = None
    """Raised by the next call whose line has `fail_on` in it."""
    fail_on: str = ""
    gone: type[Exception] = Gone
    url: str = ""
    """Where a server of its wire is reached that is told so by an option."""
    frozen: dict[str, Snapshot] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def boot(self, **how: Any) -> str:
        self.created.append(how)
        snapshot = self.frozen.get(str(how["image"]))
        sandbox = await self.local.create(SandboxSpec(network="gateway", workdir="/var/tmp/boot", snapshot=snapshot))
        if self.tunnel_port:
            relay = await asyncio.start_server(self._relay, sock=sandbox.listen(self.tunnel_port))
            self._servers.append(relay)
        name = f"sb-{next(self._numbers)}"
        self.running[name] = sandbox
        self.numbers[name] = len(self.created) - 1
        return name

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.tunnel_port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
                target.write_eof()

        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
        writer.close()
        there[1].close()

    async def run(self, name: str, argv: list[str], timeout: float, stdin: bytes = b"") -> tuple[int, str]:
        self._note(name, argv)
        result = await self.running[name].exec(argv, user="root", cwd="/", timeout=timeout, stdin=stdin)
        if result.exit_code is None and not result.timed_out:
            # Whoever kills all inside kills what waits there for the local backend's next command, too.
            result = await self.running[name].exec(argv, user="root", cwd="/", timeout=timeout, stdin=stdin)
        return (-1 if result.exit_code is None else result.exit_code), result.stdout.decode("utf-8", "replace")

    def start(self, name: str, argv: list[str], seconds: float | None) -> Piped:
        """A command whose three streams are open, and which may take some seconds."""
        self._note(name, argv)
        return Piped(cast("LocalSandbox", self.running[name]), argv, seconds)

    def _note(self, name: str, argv: list[str]) -> None:
        if self.fail_next is not None and self.fail_on in argv[-1]:
            error, self.fail_next = self.fail_next, None
            raise error
        if name not in self.running:
            raise self.gone(name)
        self.calls.append(argv[-1])

    async def freeze(self, name: str) -> str:
        kept = f"frozen-{next(self._numbers)}"
        self.frozen[kept] = await self.running[name].snapshot()
        return kept

    async def thaw(self, kept: str) -> None:
        await self.frozen.pop(kept).discard()

    async def write(self, name: str, path: str, data: bytes) -> None:
        if name not in self.running:
            raise self.gone(name)
        await self.running[name].write_file(path, data, user="root")

    async def end(self, name: str) -> None:
        if (sandbox := self.running.pop(name, None)) is None:
            raise self.gone(name)
        await sandbox.kill()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for name in list(self.running):
            await self.end(name)


@contextlib.asynccontextmanager
async def a_cloud(tunnel_port: int = 0) -> AsyncIterator[Cloud]:
    """A cloud with a backend of its own, until the end of the block."""
    local = LocalBackend()
    cloud = Cloud(local, tunnel_port)
    try:
        yield cloud
    finally:
        await cloud.close()
        await local.close()


async def check_streams(backend: SandboxBackend) -> None:
    """The gateway is reached over the streams of a command: much at once, and again after everything was killed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()) * 200_000)
        await writer.drain()
        writer.close()

    ask = "exec 3<>/dev/tcp/127.0.0.1/8400 && echo hello >&3 && cat <&3 | wc -c"
    several = f"for n in 1 2 3 4 5 6; do ( {ask} ) & done; wait"
    async with (
        await backend.create(SandboxSpec(image="some-image", network="gateway")) as sandbox,
        await asyncio.start_server(answer, sock=sandbox.listen(8400)),
    ):
        assert (await sandbox.exec(["bash", "-c", several])).stdout == b"1200000\n" * 6
        await sandbox.kill_processes()
        assert (await sandbox.exec(["bash", "-c", ask])).stdout == b"1200000\n"
