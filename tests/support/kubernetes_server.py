"""A server that speaks a cluster's wire: its API with agent-sandbox's resources, and the router to its pods.

Behind are sandboxes of the local backend. The messages are those of the official SDK, which is the client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from kubernetes_asyncio.config import kube_config

from support.clouds import Cloud
from support.serving import serving

NO_POOL = "no-such-pool"
NAMESPACE = "default"
_CLUSTER_TOKEN, _ROUTER_TOKEN = "of-the-cluster", "of-the-router"
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_CLAIMS = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxclaims"
_SANDBOXES = f"/apis/agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxes"


def _refuse(code: int, reason: str, message: str) -> web.Response:
    told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
    return web.json_response(told | {"code": code}, status=code)


def _ready(status: str, reason: str) -> dict[str, Any]:
    return {"type": "Ready", "status": status, "reason": reason, "message": f"it is {reason}"}


class _Api:
    """Claims, what a controller makes of them, and who watches that."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._claims: dict[str, dict[str, Any]] = {}
        self._versions = itertools.count(1)
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def _changed(self, claim: dict[str, Any]) -> None:
        async with self._news:
            claim["metadata"]["resourceVersion"] = str(next(self._versions))
            self._news.notify_all()

    async def create(self, request: web.Request) -> web.Response:
        claim = await request.json()
        name = claim["metadata"]["name"]
        labels = claim["metadata"]["labels"]
        if any(not _LABEL.fullmatch(text) for pair in labels.items() for text in (pair[0].split("/")[-1], pair[1])):
            return _refuse(422, "Invalid", f"SandboxClaim {name!r} is invalid: metadata.labels")
        claim["metadata"] |= {"namespace": NAMESPACE, "uid": f"uid-{name}"}
        self._claims[name] = claim
        await self._changed(claim)
        told = json.dumps(claim)
        task = asyncio.create_task(self._control(claim))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return web.Response(text=told, status=201, content_type="application/json")

    async def _control(self, claim: dict[str, Any]) -> None:
        pool = claim["spec"]["warmPoolRef"]["name"]
        if pool == NO_POOL:
            condition, sandbox = _ready("False", "WarmPoolNotFound"), {}
        elif "env" in claim["spec"]:  # what a template refuses that says nothing of it
            condition, sandbox = _ready("False", "EnvVarsInjectionRejected"), {}
        else:
            metadata = claim["metadata"]
            name = await self._cloud.boot(image=pool, metadata=metadata["labels"], claim=metadata["name"])
            condition, sandbox = _ready("True", "DependenciesReady"), {"name": name, "podIPs": ["10.1.2.3"]}
        claim["status"] = {"conditions": [condition], "sandbox": sandbox}
        await self._changed(claim)

    async def listed(self, request: web.Request) -> web.StreamResponse:
        _, _, name = request.query.get("fieldSelector", "").partition("metadata.name=")
        if request.query.get("watch", "").lower() != "true":
            found = [claim for claim in self._claims.values() if name in ("", claim["metadata"]["name"])]
            return web.json_response({"kind": "SandboxClaimList", "metadata": {}, "items": found})
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        known = int(request.query["resourceVersion"])
        async with self._news:
            while (claim := self._claims.get(name)) is not None:
                if (version := int(claim["metadata"]["resourceVersion"])) > known:
                    known = version
                    await stream.write(json.dumps({"type": "MODIFIED", "object": claim}).encode() + b"\n")
                await self._news.wait()
        return stream

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if (claim := self._claims.pop(name, None)) is None:
            return _refuse(404, "NotFound", f"sandboxclaims {name!r} not found")
        sandbox = claim.get("status", {}).get("sandbox", {}).get("name")
        if sandbox in self._cloud.running:
            await self._cloud.end(sandbox)
        await self._changed(claim)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def sandbox(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) not in self._cloud.running:
            return _refuse(404, "NotFound", f"sandboxes {name!r} not found")
        metadata = {"name": name, "namespace": NAMESPACE, "annotations": {"agents.x-k8s.io/pod-name": f"{name}-pod"}}
        status = {"conditions": [_ready("True", "DependenciesReady")], "podIPs": ["10.1.2.3"]}
        return web.json_response({"kind": "Sandbox", "metadata": metadata, "status": status})


@web.middleware
async def _let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The cluster and its router have a key each."""
    key = _CLUSTER_TOKEN if request.path.startswith("/apis/") else _ROUTER_TOKEN
    if request.headers.get("Authorization") != f"Bearer {key}":
        return _refuse(401, "Unauthorized", "Unauthorized")
    return await handler(request)


async def _execute(cloud: Cloud, request: web.Request) -> web.Response:
    """The router, and the server in the pod that it passes the request on to."""
    name = request.headers["X-Sandbox-ID"]
    assert (request.headers["X-Sandbox-Namespace"], request.headers["X-Sandbox-Port"]) == (NAMESPACE, "8888")
    if name not in cloud.running:
        return web.json_response({"detail": f"Could not connect to the backend sandbox: {name}"}, status=502)
    asked = await request.json()
    piped = cloud.start(name, shlex.split(asked["command"]), asked.get("timeout_seconds"))
    out, err = [b"".join([data async for data in piped.output(kind)]).decode() for kind in (1, 2)]
    code = await piped.ended
    return web.json_response({"stdout": out, "stderr": err, "exit_code": -9 if code is None else code})


@asynccontextmanager
async def serve(cloud: Cloud) -> AsyncIterator[None]:
    """Serve to the SDK of this process until the end of the block; the router is at the cloud's `url`."""
    api = _Api(cloud)

    async def execute(request: web.Request) -> web.Response:
        return await _execute(cloud, request)

    app = web.Application(middlewares=[_let_in], client_max_size=1 << 30)
    app.add_routes(
        [
            web.post(_CLAIMS, api.create),
            web.get(_CLAIMS, api.listed),
            web.delete(f"{_CLAIMS}/{{name}}", api.delete),
            web.get(f"{_SANDBOXES}/{{name}}", api.sandbox),
            web.post("/execute", execute),
        ]
    )
    async with serving(app) as cloud.url:
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            patch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", _kubeconfig(directory, cloud.url))
            patch.setenv("ROUTER_AUTH_TOKEN", _ROUTER_TOKEN)
            yield


def _kubeconfig(directory: str, url: str) -> str:
    """A file as people have it; where that is is read when the SDK is imported."""
    told = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": _CLUSTER_TOKEN}}],
    }
    file = Path(directory, "kubeconfig")
    file.write_text(json.dumps(told))
    return str(file)
