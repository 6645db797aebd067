"""The agents' port of a gateway with several workers: it accepts a connection and hands it to the worker it is for.

A look at the first request shows the key, and the key names the worker; nothing is read from the connection. Where no
key is seen in time any worker gets it: that one passes on what is for another, so a hand-over can be wasteful but not
wrong. A connection costs this process a few system calls once, a request nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence

from sandlot.gateway.keys import worker_named
from sandlot.gateway.workers import Workers

log = logging.getLogger(__name__)
_LOOK = 16 << 10
"""Bytes in which a key is looked for."""
_LOOK_S = 1.0
"""How long a client may take until its key has come."""
_WORKER_S = 60.0
"""How long a connection waits for its worker to be started again."""
_LOOKED_AT = 512
"""Connections that are looked at; those after them wait to be accepted, and take no file of this process."""


class Front:
    """Accepts connections for all workers. Use as an async context manager."""

    def __init__(self, workers: Workers, listening: Sequence[socket.socket]) -> None:
        self._workers = workers
        self._listening = listening
        self._accepting: list[asyncio.Task[None]] = []
        self._placing: set[asyncio.Task[None]] = set()
        self._looks = asyncio.Semaphore(_LOOKED_AT)

    async def __aenter__(self) -> Front:
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listening]
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._accepting, *self._placing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._looks.acquire()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # no file descriptors left, or a client that went at once
                log.warning("a connection could not be accepted: %s", error)
                self._looks.release()
                await asyncio.sleep(0.1)
                continue
            task = asyncio.create_task(self._place(connection))
            self._placing.add(task)
            task.add_done_callback(self._placing.discard)

    async def _place(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):
            try:
                number = worker_named(await _first_bytes(connection))
            finally:
                self._looks.release()
            async with asyncio.timeout(_WORKER_S):
                await self._workers.give(connection, number)


async def _first_bytes(connection: socket.socket) -> bytes:
    """What a client has sent when its key has come, its head is complete, or time is up. All of it stays unread."""
    connection.setblocking(False)
    seen = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            while len(seen) < _LOOK and worker_named(seen) is None and b"\r\n\r\n" not in seen:
                # Ready means more than what was seen: what stays unread would make it ready at once.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(seen) + 1)
                await readable(connection)
                before, seen = seen, connection.recv(_LOOK, socket.MSG_PEEK)
                if len(seen) == len(before):
                    break  # the client has ended what it sends
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return seen


async def readable(sock: socket.socket) -> None:
    """Wait until a socket has something to read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on a port of every address of a host; with port 0 on one that is free."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host or None, port, start_serving=False)
    found = [socket.socket(fileno=os.dup(sock.fileno())) for sock in server.sockets]
    server.close()
    for sock in found:
        sock.setblocking(False)
        sock.listen(1024)
    return found
