"""Many connections over one pair of byte streams, a line of text per message.

Both sides run this file: in a sandbox it is all there is of Sandlot, so it needs Python 3.7 and nothing else. Each side
may have `WINDOW` bytes of a connection on the way, so that one which nobody reads holds up no other.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WINDOW = 1 << 18
CONNECTIONS = 256
_PIECE = 3 << 14
_LINE = 2 * _PIECE
_BATCH = 1 << 18
_FILL = b"\n\n"
"""Nothing; an SDK may hold back the last two bytes until more come, which then are these."""
OPEN, DATA, END, TAKEN, RESET, HELLO = b"O", b"D", b"E", b"T", b"R", b"H"


class ProtocolError(Exception):
    """The other side does not keep to the messages or to the window."""


class Mux:
    """One side. `write` sends bytes to the other side; `connect` opens what the other side asks for."""

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] | None = None,
    ) -> None:
        self._write, self._connect = write, connect
        self._channels: dict[int, _Channel] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._lines: list[bytes] = []
        self._waiting = asyncio.Event()
        self._rest = b""
        self._last = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection made here."""
        if len(self._channels) >= CONNECTIONS:
            writer.close()
            return
        self._last += 1
        self.send(OPEN, self._last)
        await self._carry(_Channel(self, self._last), reader, writer)

    def send(self, kind: bytes, number: int, data: bytes = b"") -> None:
        """Queue one message; the windows bound what is queued."""
        self._lines.append(b"%b %d %b\n" % (kind, number, base64.b64encode(data)))
        self._waiting.set()

    async def send_all(self) -> None:
        """Write what is queued, many messages at once, until this is cancelled or the other side is gone."""
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._lines:
                taken = size = 0
                while taken < len(self._lines) and size < _BATCH:
                    size += len(self._lines[taken])
                    taken += 1
                batch = b"".join(self._lines[:taken])
                del self._lines[:taken]
                await self._write(batch + _FILL)

    def feed(self, data: bytes) -> int:
        """Take bytes of the other side; the number that its greeting carried, else 0."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE:
            raise ProtocolError("a message is too long")
        greeting = 0
        for line in filter(None, lines):
            try:
                kind, number, text = line.split(b" ")
                if kind == HELLO:
                    greeting = int(number)
                else:
                    self._take(kind, int(number), base64.b64decode(text, validate=True))
            except ValueError:
                raise ProtocolError(f"a message cannot be read: {line[:100]!r}") from None
        return greeting

    def _take(self, kind: bytes, number: int, data: bytes) -> None:
        channel = self._channels.get(number)
        if kind == OPEN:
            if self._connect is None or channel is not None:
                raise ProtocolError(f"the connection {number} cannot be opened")
            if len(self._channels) >= CONNECTIONS:
                self.send(RESET, number)
                return
            task = asyncio.ensure_future(self._dial(_Channel(self, number)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif channel is not None:  # else it has ended here, and the other side is about to know
            channel.take(kind, data)

    async def _dial(self, channel: _Channel) -> None:
        assert self._connect is not None
        try:
            reader, writer = await self._connect()
        except OSError:
            self.send(RESET, channel.number)
            del self._channels[channel.number]
            return
        await self._carry(channel, reader, writer)

    async def _carry(self, channel: _Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await channel.carry(reader, writer):
                self.send(RESET, channel.number)
        finally:
            del self._channels[channel.number]
            writer.close()

    def close(self) -> None:
        """Break off all connections."""
        for task in list(self._tasks):
            task.cancel()
        for channel in list(self._channels.values()):
            channel.take(RESET, b"")


class _Channel:
    """One connection."""

    def __init__(self, mux: Mux, number: int) -> None:
        self._mux, self.number = mux, number
        self._room, self._has_room = WINDOW, asyncio.Event()
        self._arrived: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._unread = 0
        self._ways: list[asyncio.Future[None]] = []
        self._reset = False
        mux._channels[number] = self

    def take(self, kind: bytes, data: bytes) -> None:
        if kind == TAKEN:
            self._room += int(data)
            if self._room > WINDOW:
                raise ProtocolError("more was taken than was sent")
            self._has_room.set()
        elif kind == RESET:
            self._reset = True
            for task in self._ways:
                task.cancel()
        else:
            self._unread += len(data)
            if self._unread > WINDOW:
                raise ProtocolError("more was sent than the window allows")
            self._arrived.put_nowait((kind, data))

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass bytes both ways until both have ended or the other end broke off; False when ours did."""
        self._ways = [asyncio.ensure_future(self._send(reader)), asyncio.ensure_future(self._receive(writer))]
        try:
            if self._reset:
                return True
            await asyncio.wait(self._ways, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._ways:
                if task.done() and not task.cancelled():
                    task.result()
            return True
        except OSError:
            return False
        finally:
            for task in self._ways:
                task.cancel()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        while True:
            while self._room <= 0:
                self._has_room.clear()
                await self._has_room.wait()
            data = await reader.read(min(_PIECE, self._room))
            if not data:
                self._mux.send(END, self.number)
                return
            self._room -= len(data)
            self._mux.send(DATA, self.number, data)

    async def _receive(self, writer: asyncio.StreamWriter) -> None:
        while True:
            kind, data = await self._arrived.get()
            if kind == END:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            self._unread -= len(data)
            self._mux.send(TAKEN, self.number, b"%d" % len(data))


async def _inside(port: int) -> None:
    """Carry the connections to 127.0.0.1:`port` over stdout and stdin, until stdin ends."""
    loop = asyncio.get_event_loop()

    def put(data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    async def write(data: bytes) -> None:
        await loop.run_in_executor(None, put, data)

    async def receive() -> None:
        while True:
            data = await loop.run_in_executor(None, os.read, 0, 1 << 16)
            if not data:
                return
            mux.feed(data)

    mux = Mux(write)
    await asyncio.start_server(mux.accept, "127.0.0.1", port)
    mux.send(HELLO, os.getpid())
    both = {asyncio.ensure_future(receive()), asyncio.ensure_future(mux.send_all())}
    for task in (await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))[0]:
        task.result()


if __name__ == "__main__":
    try:
        asyncio.run(_inside(int(sys.argv[1])))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)  # a thread may still wait for stdin
