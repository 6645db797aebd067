"""The relay to the gateway over one command's stdio: a real process is the command, real sockets are its two ends."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.remote import mux
from sandlot.sandbox.remote.relay import Relay, loopback_listener
from support.backends import free_port

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Command:
    """See `Stream`: a process of this machine. Its last two bytes wait for more, as in Daytona's SDK."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._waiting = b""

    async def read(self) -> tuple[int, bytes] | None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(1 << 16):
            data = self._waiting + data
            self._waiting = data[-2:]
            if data[:-2]:
                return 1, data[:-2]
        return None

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    def skip(self, kind: int) -> None: ...

    async def exit_code(self) -> int | None:
        return self.process.returncode

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Place:
    """Where commands run that a relay starts."""

    def __init__(self) -> None:
        self.port = free_port()
        self.commands: list[Command] = []

    async def start(self, argv: Sequence[str]) -> Command:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("python3", "-c", argv[-1], argv[-2], stdin=pipe, stdout=pipe)
        self.commands.append(Command(process))
        return self.commands[-1]

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[Place]:
    place = Place()
    relay = Relay(place.start, place.port)
    server = await asyncio.start_server(handler, sock=relay.listener)
    try:
        await relay.ready
        yield place
    finally:
        relay.close()
        server.close()
        for command in place.commands:
            await command.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, and its digest after its end."""
    digest = hashlib.sha256()
    while data := await reader.read(1 << 16):
        digest.update(data)
        writer.write(data)
        await writer.drain()
    writer.write(digest.digest())
    writer.close()


async def exchange(place: Place, data: bytes) -> None:
    reader, writer = await place.dial()

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    assert await reader.read(-1) == data + hashlib.sha256(data).digest()
    await sending
    writer.close()


async def test_many_connections_at_once_each_get_their_own() -> None:
    rng = random.Random(5)
    async with served(echo) as place:
        sizes = [0, 1, 100, mux.WINDOW, mux.WINDOW + 1, 3 << 20] * 10 + [1000] * 100
        await asyncio.gather(*(exchange(place, rng.randbytes(size)) for size in sizes))
        assert len(place.commands) == 1


async def test_a_long_answer_streams_and_its_end_is_seen() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(512):
            writer.write(bytes([number % 256]) * (1 << 16))
            await writer.drain()
        writer.close()

    async with served(flood) as place:
        reader, writer = await place.dial()
        total = 0
        while data := await reader.read(1 << 16):
            assert data[0] == total // (1 << 16) % 256
            total += len(data)
        assert total == 32 << 20
        writer.close()


async def test_a_reader_that_sleeps_holds_up_nobody() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if await reader.readline() != b"flood\n":
            return await echo(reader, writer)
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with served(serve) as place:
        _, sleeping = await place.dial()
        sleeping.write(b"flood\n")
        for _ in range(3):
            reader, writer = await place.dial()
            writer.write(b"echo\nhello")
            writer.write_eof()
            assert (await reader.read(-1)).startswith(b"hello")
            writer.close()
        assert sent < 64 << 20  # what the sockets and one window hold
        sleeping.close()


async def test_each_side_sees_the_other_break_off() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline() == b"leave me\n":
            writer.transport.abort()
            return
        try:
            while True:
                writer.write(b"tick\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            gone.set()

    async with served(serve) as place:
        reader, writer = await place.dial()
        writer.write(b"leave me\n")
        try:
            assert await reader.read(-1) == b""
        except ConnectionResetError:
            pass
        reader, writer = await place.dial()
        writer.write(b"tell me\n")
        assert await reader.readline() == b"tick\n"
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 60)


async def test_half_closed_connections_work_both_ways() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all of mine")
        writer.write_eof()
        heard.set_result(await reader.read(-1))
        writer.close()

    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with served(serve) as place:
        reader, writer = await place.dial()
        assert await reader.read(-1) == b"all of mine"
        writer.write(b"and mine after that")
        writer.write_eof()
        assert await asyncio.wait_for(heard, 60) == b"and mine after that"
        writer.close()


async def test_a_command_that_dies_breaks_its_connections_and_is_started_again() -> None:
    async with served(echo) as place:
        reader, writer = await place.dial()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        place.commands[0].process.kill()
        try:
            assert await reader.read(-1) == b""
        except ConnectionResetError:
            pass
        while True:
            try:
                await exchange(place, b"again")
                break
            except OSError:
                await asyncio.sleep(0.05)
        assert len(place.commands) == 2


async def test_no_small_packet_of_an_answer_is_held_back() -> None:
    without_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        without_delay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = loopback_listener()
    async with await asyncio.start_server(answer, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await without_delay == 1
        writer.close()


async def test_what_cannot_start_is_told_and_not_tried_for_ever() -> None:
    place = Place()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", place.port))
        taken.listen()
        relay = Relay(place.start, place.port)
        with pytest.raises(SandboxError, match=f"relay of port {place.port} did not start"):
            await relay.ready
    assert len(place.commands) == 1

    async def lost(argv: Sequence[str]) -> Command:
        raise SandboxLostError("the sandbox is gone")

    with pytest.raises(SandboxLostError):
        await Relay(lost, 1).ready


@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b"O 1 \n", b"D 1 eA==\n", b"E 1 \n", b"T 1 OTk=\n"])))
)
def test_nothing_that_a_sandbox_sends_breaks_more_than_the_relay(pieces: list[bytes]) -> None:
    async def run() -> None:
        async def write(data: bytes) -> None: ...

        async def refuse() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            raise ConnectionRefusedError

        here = mux.Mux(write, refuse)
        try:
            for piece in pieces:
                here.feed(piece)
                await asyncio.sleep(0)
        except mux.ProtocolError:
            pass
        here.close()
        await asyncio.sleep(0)

    asyncio.run(run())


async def test_more_than_the_window_is_refused() -> None:
    async def write(data: bytes) -> None: ...

    async def never() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await asyncio.Event().wait()
        raise AssertionError

    here = mux.Mux(write, never)
    here.feed(b"O 1 \n")
    piece = base64.b64encode(bytes(1 << 15))
    for _ in range(mux.WINDOW >> 15):
        here.feed(b"D 1 " + piece + b"\n")
    with pytest.raises(mux.ProtocolError, match="window"):
        here.feed(b"D 1 eA==\n")
    with pytest.raises(mux.ProtocolError, match="too long"):
        here.feed(b"x" * (1 << 20))
    here.close()

    another = mux.Mux(write, never)
    another.feed(b"O 1 \n")
    with pytest.raises(mux.ProtocolError, match="more was taken"):
        another.feed(b"T 1 MTAw\n")
    another.close()
