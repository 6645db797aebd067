"""A web server of this machine, for the time of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler


@web.middleware
async def _cut(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Cut the connection where a handler raises what a client sees then."""
    try:
        return await handler(request)
    except (ConnectionError, TimeoutError):
        assert request.transport is not None
        request.transport.abort()
        raise


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve on a free port until the end of the block, at the address that is given."""
    app.middlewares.insert(0, _cut)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
