"""A server that speaks Daytona's wire, its API with events and its daemons, with sandboxes of the local backend behind.

The messages are those of the official SDK, which is the client and brings what this needs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import socketio
from aiohttp import web
from aiohttp.typedefs import Handler

from support.clouds import Cloud
from support.piped import Piped
from support.serving import serving

KEY = "dtn_" + "0" * 64
_OUT, _PAGE = b"\1\1\1", 1
_TIME = "2026-01-01T00:00:00.000Z"

# $1: a command. Its stdin stays open, and each line that it says gets a mark of where it was said, by processes beside
# it in the sandbox; so does Daytona's daemon.
_SESSION = r"""
cd / && d=$(mktemp -d) && mkfifo $d/in $d/out $d/err || exit 1
mark() { while IFS= read -r line || [ -n "$line" ]; do printf "$1%s\n" "$line"; done; }
mark '\1\1\1' <$d/out & out=$!
mark '\2\2\2' <$d/err & err=$!
exec 3<&0
cat <&3 >$d/in & in=$!
sh -c "$1" <$d/in >$d/out 2>$d/err
kill $in; wait $out $err; rm -r $d
"""


@dataclass
class _Command:
    piped: Piped
    echoes: bool
    followers: list[web.WebSocketResponse] = field(default_factory=list)


def _refuse(status: int, message: str, source: str = "DAYTONA_API") -> web.Response:
    told = {"statusCode": status, "message": message, "source": source, "timestamp": _TIME}
    return web.json_response(told, status=status)


class Account:
    """The API, and the events about what it changes."""

    def __init__(self, cloud: Cloud, events: socketio.AsyncServer) -> None:
        self.url = ""
        self.fails = ""
        """Why no sandbox starts."""
        self.states: dict[str, str] = {}
        self._cloud, self._events = cloud, events
        self._asked: dict[str, dict[str, Any]] = {}
        self._snapshots: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = itertools.count()

    def found(self, name: str) -> str | None:
        """The number of a sandbox by that or by its name, while there is one."""
        for sandbox, state in self.states.items():
            if name in (sandbox, self._asked[sandbox]["name"]):
                return sandbox if state == "error" or sandbox in self._cloud.running else None
        return None

    def _told(self, sandbox: str) -> dict[str, Any]:
        asked, state = self._asked[sandbox], self.states[sandbox]
        about = {"id": sandbox, "organizationId": "org", "name": asked["name"], "user": asked["user"], "state": state}
        size = {"cpu": asked.get("cpu", 1), "memory": asked.get("memory", 1), "disk": asked.get("disk", 3), "gpu": 0}
        kept = {key: asked[key] for key in ("env", "labels", "networkBlockAll")}
        rest = {"public": False, "kvm": False, "target": "us", "toolboxProxyUrl": f"{self.url}/toolbox"}
        return about | size | kept | rest | ({"errorReason": self.fails} if state == "error" else {})

    async def _become(self, sandbox: str, state: str) -> None:
        old, self.states[sandbox] = self.states[sandbox], state
        told = {"sandbox": self._told(sandbox), "oldState": old, "newState": state}
        await self._events.emit("sandbox.state.updated", told)

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        image = asked.get("snapshot") or asked["buildInfo"]["dockerfileContent"].split()[1]
        if "snapshot" in asked and image not in self._snapshots.values():
            return _refuse(404, f"Snapshot {image} not found")
        sandbox = f"failed-{next(self._failed)}" if self.fails else await self._cloud.boot(**asked, image=image)
        self._asked[sandbox], self.states[sandbox] = {"name": sandbox, **asked}, "creating"
        told = self._told(sandbox)
        self._begin(self._become(sandbox, "error" if self.fails else "started"))
        return web.json_response(told)

    async def listed(self, request: web.Request) -> web.Response:
        start = int(request.query.get("cursor", 0))
        told = [self._told(sandbox) for sandbox in self.states if self.found(sandbox)]
        after = str(start + _PAGE) if len(told) > start + _PAGE else None
        return web.json_response({"items": told[start : start + _PAGE], "nextCursor": after})

    async def get(self, request: web.Request) -> web.Response:
        if (sandbox := self.found(request.match_info["name"])) is None:
            return _refuse(404, "Sandbox not found")
        return web.json_response(self._told(sandbox))

    async def delete(self, request: web.Request) -> web.Response:
        if (sandbox := self.found(request.match_info["name"])) is None:
            return _refuse(404, "Sandbox not found")
        await self._become(sandbox, "destroyed")
        told = self._told(sandbox)
        del self.states[sandbox]
        if sandbox in self._cloud.running:
            await self._cloud.end(sandbox)
        return web.json_response(told)

    async def freeze(self, request: web.Request) -> web.Response:
        if (sandbox := self.found(request.match_info["name"])) is None:
            return _refuse(404, "Sandbox not found")
        name = (await request.json())["name"]
        await self._become(sandbox, "snapshotting")

        async def freeze() -> None:
            self._cloud.frozen[name] = self._cloud.frozen.pop(await self._cloud.freeze(sandbox))
            self._snapshots[str(uuid.uuid4())] = name
            await self._become(sandbox, "started")

        self._begin(freeze())
        return web.json_response(self._told(sandbox))

    async def snapshot(self, request: web.Request) -> web.Response:
        named = request.match_info["name"]
        for number, name in self._snapshots.items():
            if named in (number, name):
                about = {"id": number, "general": False, "name": name, "state": "active", "sourceSandboxId": None}
                size = {"size": 1, "cpu": 1, "gpu": 0, "mem": 1, "disk": 3, "entrypoint": None, "errorReason": None}
                times = {"createdAt": _TIME, "updatedAt": _TIME, "lastUsedAt": None}
                return web.json_response(about | size | times)
        return _refuse(404, f"Snapshot {named} not found")

    async def thaw(self, request: web.Request) -> web.Response:
        if (name := self._snapshots.pop(request.match_info["name"], None)) is None:
            return _refuse(404, "Snapshot not found")
        await self._cloud.thaw(name)
        return web.Response()


class _Toolbox:
    """The daemon of each sandbox, behind the proxy that knows which run."""

    def __init__(self, cloud: Cloud, account: Account) -> None:
        self._cloud, self._account = cloud, account
        self._sessions: dict[str, dict[str, _Command]] = {}

    @web.middleware
    async def proxy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who has the key, and to the daemons only of what runs."""
        if request.headers.get("Authorization") != f"Bearer {KEY}" and "/socket.io/" not in request.path:
            return _refuse(401, "Invalid credentials")
        if request.path.startswith("/toolbox/"):
            if request.match_info["name"] not in self._cloud.running:
                return _refuse(400, "no IP address found. Is the Sandbox started?", "DAYTONA_PROXY")
            if (session := request.match_info.get("session")) and session not in self._sessions:
                return _refuse(404, "session not found", "DAYTONA_DAEMON")
        return await handler(request)

    async def execute(self, request: web.Request) -> web.Response:
        asked = await request.json()
        line = ["sh", "-c", f"cd {asked.get('cwd', '/')} && {{ {asked['command']}\n}} 2>&1"]
        piped = self._cloud.start(request.match_info["name"], line, asked.get("timeout", 360))
        said = b"".join([data async for data in piped.output(1)])
        if (code := await piped.ended) is None and not said:
            return _refuse(408, "command execution timeout", "DAYTONA_DAEMON")
        return web.json_response({"exitCode": -1 if code is None else code, "result": said.decode("utf-8", "replace")})

    async def upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        for key, sent in form.items():
            if isinstance(sent, web.FileField):
                path = str(form[key.replace(".file", ".path")])
                await self._cloud.write(request.match_info["name"], path, sent.file.read())
        return web.Response()

    async def open(self, request: web.Request) -> web.Response:
        session = (await request.json())["sessionId"]
        if session in self._sessions:
            return _refuse(409, "session already exists", "DAYTONA_DAEMON")
        self._sessions[session] = {}
        return web.Response(status=201)

    async def run(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["runAsync"], "nothing else is spoken here"
        piped = self._cloud.start(request.match_info["name"], ["sh", "-c", _SESSION, "sh", asked["command"]], None)
        number = str(uuid.uuid4())
        self._sessions[request.match_info["session"]][number] = _Command(piped, not asked.get("suppressInputEcho"))
        return web.json_response({"cmdId": number}, status=202)

    async def send(self, request: web.Request) -> web.Response:
        data = (await request.json())["data"]
        command = self._sessions[request.match_info["session"]][request.match_info["command"]]
        if command.piped.ended.done():
            return _refuse(410, "command has already completed", "DAYTONA_DAEMON")
        line = data.encode() if data.endswith("\n") else f"{data}\n".encode()
        await command.piped.send(line)
        if command.echoes:
            for follower in command.followers:
                await follower.send_bytes(_OUT + line)
        return web.Response(status=204)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        command = self._sessions[request.match_info["session"]][request.match_info["command"]]
        assert request.query["follow"] == "true"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        command.followers.append(socket)

        async def follow() -> None:
            async for data in command.piped.output(1):
                for start in range(0, len(data), 1024):
                    await socket.send_bytes(data[start : start + 1024])
            await socket.close()

        following = asyncio.create_task(follow())
        try:
            async for _ in socket:
                pass
        finally:
            following.cancel()
        return socket

    async def close(self, request: web.Request) -> web.Response:
        for command in self._sessions.pop(request.match_info["session"]).values():
            await command.piped.kill()
        return web.Response(status=204)


def _events() -> socketio.AsyncServer:
    events = socketio.AsyncServer(async_mode="aiohttp", transports=["websocket"])

    async def connect(_: str, __: Any, auth: dict[str, str]) -> bool:
        return auth["token"] == KEY

    events.on("connect", connect)
    return events


@asynccontextmanager
async def serve(cloud: Cloud) -> AsyncIterator[Account]:
    """Serve to the SDK of this process until the end of the block; the account."""
    events = _events()
    account = Account(cloud, events)
    toolbox = _Toolbox(cloud, account)
    app = web.Application(middlewares=[toolbox.proxy], client_max_size=1 << 30)
    events.attach(app, "/api/socket.io")
    inside, session = "/toolbox/{name}/process", "/toolbox/{name}/process/session/{session}"
    app.add_routes(
        [
            web.post("/api/sandbox", account.create),
            web.get("/api/sandbox", account.listed),
            web.get("/api/sandbox/{name}", account.get),
            web.delete("/api/sandbox/{name}", account.delete),
            web.post("/api/sandbox/{name}/snapshot", account.freeze),
            web.get("/api/snapshots/{name}", account.snapshot),
            web.delete("/api/snapshots/{name}", account.thaw),
            web.post("/toolbox/{name}/files/bulk-upload", toolbox.upload),
            web.post(f"{inside}/execute", toolbox.execute),
            web.post(f"{inside}/session", toolbox.open),
            web.delete(session, toolbox.close),
            web.post(f"{session}/exec", toolbox.run),
            web.post(f"{session}/command/{{command}}/input", toolbox.send),
            web.get(f"{session}/command/{{command}}/logs", toolbox.logs),
        ]
    )
    async with serving(app) as account.url:
        os.environ.update(DAYTONA_API_KEY=KEY, DAYTONA_API_URL=f"{account.url}/api")
        yield account
