"""Serves an application on so many connections: an agent may open as many as it likes, and leave them."""

from __future__ import annotations

import resource
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web


class BoundedRunner(web.AppRunner):
    """Beyond `connections`, or half of the files that this process may open, the oldest without a request end."""

    def __init__(self, app: web.Application, connections: int, **options: Any) -> None:
        super().__init__(app, **options)
        self._most = max(1, min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._busy: set[web.RequestHandler] = set()
        app.middlewares.insert(0, self._marking())

    @property
    def server(self) -> web.Server | None:
        """What is called for the protocol of each new connection."""
        server = super().server
        return None if server is None else cast("web.Server", lambda: self._next(server))

    def _next(self, server: web.Server) -> web.RequestHandler:
        known = [one for one in server.connections if one.transport and not one.transport.is_closing()]
        if (spare := len(known) + 1 - self._most) > 0:
            for idle in [one for one in known if one not in self._busy][:spare]:
                idle.force_close()
        return server()

    def _marking(self) -> Any:
        @web.middleware
        async def mark(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self._busy.add(request.protocol)
            try:
                return await handler(request)
            finally:
                self._busy.discard(request.protocol)

        return mark
