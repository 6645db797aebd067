"""A server that speaks E2B's wire, its REST and what runs in its sandboxes, with sandboxes of the local backend behind.

The messages are those of the official SDK, which is the client. Needs that SDK and uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, unquote

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof

from support.clouds import Cloud
from support.piped import Piped

KEY = "e2b_" + "0" * 40
Reply = tuple[int, Any]
_GONE: dict[str, Any] = {"code": 502, "message": "The sandbox was not found"}
_TIMES = {"startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-02T00:00:00Z"}


class Envd(Process):
    """The daemon of each sandbox, told apart by a header."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._live: dict[int, Piped] = {}

    async def start(self, request: pb.StartRequest, ctx: Any) -> AsyncIterator[pb.StartResponse]:
        name, process = ctx.request_headers["e2b-sandbox-id"], request.process
        assert process is not None
        argv = [process.cmd, *process.args]
        seconds = (ctx.timeout_ms or 3_600_000) / 1000
        pid = len(self._live) + 1000
        try:
            if request.stdin:
                self._live[pid] = self._cloud.start(name, argv, None)
                yield _event("start", pb.ProcessEvent.StartEvent(pid=pid))
                async for data in self._live[pid].output(1):
                    yield _event("data", pb.ProcessEvent.DataEvent(output=Oneof("stdout", data)))
                code = 0
            else:
                yield _event("start", pb.ProcessEvent.StartEvent(pid=pid))
                code, said = await self._cloud.run(name, argv, seconds)
                if said:
                    yield _event("data", pb.ProcessEvent.DataEvent(output=Oneof("stdout", said.encode())))
        except self._cloud.gone as error:
            raise ConnectError(Code.UNAVAILABLE, _GONE["message"]) from error
        yield _event("end", pb.ProcessEvent.EndEvent(exit_code=code, exited=True))

    async def send_input(self, request: pb.SendInputRequest, ctx: Any) -> pb.SendInputResponse:
        await self._live[request.process.selector.value].send(request.input.input.value)
        return pb.SendInputResponse()

    async def send_signal(self, request: pb.SendSignalRequest, ctx: Any) -> pb.SendSignalResponse:
        await self._live[request.process.selector.value].kill()
        return pb.SendSignalResponse()


def _event(kind: Any, event: Any) -> pb.StartResponse:
    return pb.StartResponse(event=pb.ProcessEvent(event=Oneof(kind, event)))


class Rest:
    """The API of the account, and the files of each sandbox."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    async def __call__(self, method: str, path: str, query: dict[str, list[str]], headers: Any, body: bytes) -> Reply:
        cloud, parts = self._cloud, [unquote(part) for part in path.strip("/").split("/")]
        if path == "/health":
            return (204, None) if headers[b"e2b-sandbox-id"].decode() in cloud.running else (502, _GONE)
        if path == "/files" and method == "POST":
            assert headers[b"content-type"] == b"application/octet-stream"
            name = headers[b"e2b-sandbox-id"].decode()
            if name not in cloud.running:
                return 502, _GONE
            await cloud.write(name, query["path"][0], body)
            return 200, [{"name": os.path.basename(query["path"][0]), "type": "file", "path": query["path"][0]}]
        if parts[0] == "v2":
            parts = parts[1:]
        if headers.get(b"x-api-key", b"").decode() != KEY:
            return 401, {"code": 401, "message": "invalid key"}
        if (method, path) == ("POST", "/v2/sandboxes"):
            asked = json.loads(body)
            how = {"image": asked["templateID"], "seconds": asked["timeout"], "metadata": asked["metadata"]}
            names = {"denyOut": "deny_out", "allowOut": "allow_out"}
            network = {names[key]: value for key, value in asked["network"].items()}
            return 201, self._told(await cloud.boot(**how, env=asked["envVars"], network=network))
        if (method, path) == ("GET", "/v2/sandboxes"):
            return 200, [self._told(name) for name in cloud.running]
        if method == "DELETE" and parts[0] == "templates":
            await cloud.thaw(parts[1])
            return 204, None
        if len(parts) > 1 and parts[1] not in cloud.running:
            return 404, {"code": 404, "message": "not found"}
        if method == "DELETE":
            await cloud.end(parts[1])
            return 204, None
        if method == "POST" and parts[2:] == ["connect"]:
            return 200, self._told(parts[1])
        if method == "POST" and parts[2:] == ["snapshots"]:
            return 201, {"snapshotID": await cloud.freeze(parts[1]), "names": []}
        return 404, {"code": 404, "message": f"no {method} {path}"}

    def _told(self, name: str) -> dict[str, Any]:
        made = self._cloud.created[self._cloud.numbers[name]]
        about = {"templateID": made["image"], "sandboxID": name, "clientID": "c", "envdVersion": "0.6.7", **_TIMES}
        size = {"cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024, "state": "running"}
        return {**about, **size, "metadata": made["metadata"]}


@asynccontextmanager
async def serve(cloud: Cloud) -> AsyncIterator[None]:
    """Serve until the end of the block, to the SDK in this process."""
    envd, rest = ProcessASGIApplication(Envd(cloud)), Rest(cloud)

    async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/process."):
            await envd(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        query = parse_qs(scope["query_string"].decode())
        status, reply = await rest(scope["method"], scope["path"], query, dict(scope["headers"]), body)
        data = b"" if reply is None else json.dumps(reply).encode()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": data})

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 it has no event for that
        await asyncio.sleep(0.01)
    try:
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        os.environ.update(E2B_API_KEY=KEY, E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_HTTP_VERSION="1.1")
        yield
    finally:
        server.should_exit = True
        server.force_exit = True
        with suppress(asyncio.CancelledError):
            await serving
