"""A worker process's side of a gateway with several: takes connections from its parent, passes on what is another's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from sandlot.gateway.control import control_app
from sandlot.gateway.gateway import Gateway
from sandlot.gateway.keys import worker_named
from sandlot.gateway.relay import client_of, relay
from sandlot.gateway.server import agent_app, key_of, refused, wire_of
from sandlot.gateway.wire import WireError
from sandlot.gateway.workers import agents_socket, control_socket

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WorkerServer:
    """Serves one worker's gateway: handed connections, requests from other workers, its part of the control side.

    `gone` is called when the parent is: then the worker is `orphaned` and must end.
    """

    def __init__(
        self,
        gateway: Gateway,
        number: int,
        workers: int,
        directory: Path,
        channel: socket.socket,
        gone: Callable[[], None],
    ) -> None:
        self.orphaned = False
        self._gateway = gateway
        self._gone = gone
        self._number = number
        self._directory = directory
        self._channel = channel
        self._peers = [client_of(agents_socket(directory, other)) for other in range(workers)]
        self._taking: set[asyncio.Task[None]] = set()

    async def start(self, admin_key: str, base_url: str, beat: float) -> None:
        """Begin to serve, with a sign of life every `beat` seconds; it ends with the gateway."""
        gateway, directory = self._gateway, self._directory
        control = await gateway.runner(control_app(gateway, admin_key, base_url))
        await web.UnixSite(control, str(control_socket(directory, self._number))).start()
        inner = await gateway.runner(agent_app(gateway))
        await web.UnixSite(inner, str(agents_socket(directory, self._number))).start()
        agents = agent_app(gateway, middlewares=[self._elsewhere()])
        agents.on_cleanup.append(self._close_peers)  # once nobody asks them any more
        outer = await gateway.runner(agents, gateway.limits.connections)
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._take, outer)
        self._beat(beat)

    async def close(self) -> None:
        """Take no more connections."""
        asyncio.get_running_loop().remove_reader(self._channel)

    async def _close_peers(self, app: web.Application) -> None:
        for peer in self._peers:
            await peer.close()

    def _beat(self, every: float) -> None:
        with contextlib.suppress(OSError):  # those before are still unread, or the parent is gone
            self._channel.send(b".")
        asyncio.get_running_loop().call_later(every, self._beat, every)

    def _take(self, runner: web.AppRunner) -> None:
        try:
            mark, fds, _, _ = socket.recv_fds(self._channel, 1, 1)
        except BlockingIOError:
            return
        if not mark:
            asyncio.get_running_loop().remove_reader(self._channel)
            self.orphaned = True
            self._gone()
        for fd in fds:
            task = asyncio.create_task(_serve(socket.socket(fileno=fd), runner))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    def _elsewhere(self) -> Middleware:
        """A connection may carry requests of several sessions: those of another worker are passed on to it."""

        @web.middleware
        async def pass_on(request: web.Request, handler: Handler) -> web.StreamResponse:
            number = worker_named(key_of(request).encode("utf-8", "surrogatepass"))
            if number is None or number == self._number or number >= len(self._peers):
                return await handler(request)
            try:
                return await relay(request, self._peers[number])
            except aiohttp.ClientConnectionError:
                error = WireError("overloaded", "the process that has this session is being started again; try again")
                return refused(wire_of(request), error)

        return pass_on


async def _serve(connection: socket.socket, runner: web.AppRunner) -> None:
    connection.setblocking(False)
    assert runner.server is not None
    try:
        await asyncio.get_running_loop().connect_accepted_socket(runner.server, connection)
    except OSError as error:  # the client is gone
        log.debug("a connection ended before it was served: %s", error)
        connection.close()
