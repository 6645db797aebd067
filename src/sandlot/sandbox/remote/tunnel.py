"""The way back from a sandbox elsewhere to the gateway here: one public port, and a secret per listening socket.

Inside, a small forwarder listens on the sandbox's own loopback and opens each connection with the secret, which only
the sandbox's root can read. Here, the secret says which socket a connection is for; without one it is closed.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from sandlot.errors import ConfigError
from sandlot.sandbox.remote.relay import loopback_listener

_GREETING_SECONDS = 10.0
SECRET_BYTES = 64

FORWARDER = """
import asyncio, ssl, sys
port, host, remote, tls = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "tls"
secret = open(sys.argv[5], "rb").read().strip()
async def pump(reader, writer):
    try:
        while True:
            data = await reader.read(65536)
            if not data: break
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof(): writer.write_eof()
    except OSError: pass
async def serve(reader, writer):
    try:
        there = await asyncio.open_connection(host, remote, ssl=ssl.create_default_context() if tls else None)
    except OSError:
        writer.close()
        return
    there[1].write(secret)
    tasks = [asyncio.create_task(pump(reader, there[1])), asyncio.create_task(pump(there[0], writer))]
    await tasks[1]
    tasks[0].cancel()
    for one in (writer, there[1]): one.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    open(sys.argv[5] + ".ready", "w").close()
    await server.serve_forever()
asyncio.run(main())
"""


class Tunnel:
    """Accepts forwarders on `bind`. `advertise_url` is what sandboxes dial: `tcp://HOST:PORT`, or `tls://` for a TLS
    terminator in front of it.
    """

    def __init__(self, advertise_url: str, bind: str = "") -> None:
        url = urlsplit(advertise_url)
        if url.scheme not in ("tcp", "tls") or not url.hostname or not url.port:
            raise ConfigError(f"advertise_url {advertise_url!r} is not tcp://HOST:PORT or tls://HOST:PORT")
        self.host, self.port, self.tls = url.hostname, url.port, url.scheme == "tls"
        host, _, port = (bind or f"0.0.0.0:{url.port}").rpartition(":")
        self._bind = (host or "0.0.0.0", int(port))
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._targets: dict[bytes, socket.socket] = {}

    async def start(self) -> None:
        """Open the public port, once."""
        async with self._starting:
            if self._server is None:
                try:
                    self._server = await asyncio.start_server(self._greet, *self._bind)
                except OSError as error:
                    raise ConfigError(
                        f"the tunnel cannot listen on {self._bind[0]}:{self._bind[1]}: {error}"
                    ) from error

    def open(self) -> tuple[str, socket.socket]:
        """(secret, listening socket to be served): whoever greets with the secret arrives there."""
        listener = loopback_listener()
        secret = secrets.token_hex(SECRET_BYTES // 2)
        self._targets[secret.encode()] = listener
        return secret, listener

    def forget(self, secret: str) -> None:
        """Let nobody in by this secret any more."""
        self._targets.pop(secret.encode(), None)

    async def close(self) -> None:
        """Close the public port."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                secret = await reader.readexactly(SECRET_BYTES)
            listener = self._targets.get(secret)
            if listener is not None and listener.fileno() >= 0:
                there = await asyncio.open_connection(*listener.getsockname())
                sending = asyncio.create_task(pump(reader, there[1]))
                await pump(there[0], writer)
                sending.cancel()
                there[1].close()
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes until it ends or breaks."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
