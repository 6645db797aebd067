"""A relay to a gateway that breaks the connection in the middle of one answer, as a network may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


@asynccontextmanager
async def cutting(url: str, before: bytes) -> AsyncIterator[str]:
    """Relay to `url`; the first answer that holds `before` ends there, the connection reset. Yields the new URL."""
    target, cut = urlsplit(url), False

    async def up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def down(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cut
        seen = b""
        while data := await reader.read(65536):
            at = -1 if cut else (seen + data).find(before)
            if at >= 0:
                cut = True
                writer.write(data[: max(0, at - len(seen))])
                await writer.drain()
                writer.transport.abort()
                return
            seen = (seen + data)[-len(before) :]
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection(target.hostname, target.port)
        ways = [asyncio.create_task(up(reader, below)), asyncio.create_task(down(above, writer))]
        with suppress(ConnectionError):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        below.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
