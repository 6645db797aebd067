"""A server that speaks Modal's wire, of control plane and command router, with sandboxes of the local backend behind.

The messages are those of the official SDK, which is the client. Needs that SDK.
"""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import modal
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from support.clouds import Cloud
from support.piped import Piped

TOKEN = ("ak-test", "as-test")
_FROZEN = "im-of-"
_DONE = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)


def _token(part: str) -> str:
    """A token that is good for an hour, as far as its client can tell."""
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode()).decode().rstrip("=")
    return f"{part}.{claims}.signature"


class _Service:
    """The calls of `base`, by its definitions, that have a method of their name here; there are no others."""

    base: Any

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def let_in(self, metadata: Any) -> bool:
        raise NotImplementedError

    def __mapping__(self) -> dict[str, Any]:
        blank = type("Blank", (self.base,), {})
        blank.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        served = {}
        for path, handler in self.base.__mapping__(blank()).items():
            if hasattr(self, name := path.rpartition("/")[2]):
                served[path] = handler._replace(func=self._answering(name))
        return served

    def _answering(self, name: str) -> Callable[[Any], Any]:
        async def answer(stream: Any) -> None:
            if not self.let_in(stream.metadata):
                raise GRPCError(Status.UNAUTHENTICATED, "the token is not valid")
            request, call = await stream.recv_message(), getattr(self, name)
            try:
                if inspect.isasyncgenfunction(call):
                    async for reply in call(request):
                        await stream.send_message(reply)
                else:
                    await stream.send_message(await call(request))
            except self.cloud.gone as error:
                raise GRPCError(Status.NOT_FOUND, f"{error} not found") from error
            except OSError as error:
                raise GRPCError(Status.FAILED_PRECONDITION, str(error)) from error

        return answer


class ControlPlane(_Service):
    """Apps, images, and sandboxes as wholes."""

    base = ModalClientBase

    def __init__(self, cloud: Cloud, router_url: str) -> None:
        super().__init__(cloud)
        self._access = api.CommandRouterAccess(url=router_url, jwt=_token("router"))
        self._images: dict[str, dict[str, Any]] = {}
        self._files: dict[str, bytes] = {}
        self._mounts: dict[str, dict[str, bytes]] = {}
        self._numbers = itertools.count()

    def let_in(self, metadata: Any) -> bool:
        return (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) == TOKEN

    async def ClientHello(self, request: Empty) -> api.ClientHelloResponse:
        return api.ClientHelloResponse()

    async def AuthTokenGet(self, request: Any) -> api.AuthTokenGetResponse:
        return api.AuthTokenGetResponse(token=_token("control"))

    async def AppGetOrCreate(self, request: Any) -> api.AppGetOrCreateResponse:
        return api.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    async def EnvironmentGetOrCreate(self, request: Any) -> api.EnvironmentGetOrCreateResponse:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata)

    async def ImageGetOrCreate(self, request: Any) -> api.ImageGetOrCreateResponse:
        name = f"im-{next(self._numbers)}"
        asked = request.image
        made = {"image": "\n".join(asked.dockerfile_commands).strip().removeprefix("FROM ")}
        for base in asked.base_images:  # one that was made before, under a name for this Dockerfile
            below = self._images[base.image_id]
            made = {**below, "image": below["image"] + made["image"].removeprefix(base.docker_tag)}
        self._images[name] = {"context": self._mounts.get(asked.context_mount_id), **made}
        return api.ImageGetOrCreateResponse(image_id=name, result=_DONE)

    async def MountBatchedCheckExistence(self, request: Any) -> api.MountBatchedCheckExistenceResponse:
        missing = set(request.sha256_hex_hashes) - set(self._files)
        return api.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: Any) -> api.MountPutFileResponse:
        if request.data:
            self._files[request.sha256_hex] = request.data
        return api.MountPutFileResponse(exists=request.sha256_hex in self._files)

    async def MountGetOrCreate(self, request: Any) -> api.MountGetOrCreateResponse:
        name = f"mo-{next(self._numbers)}"
        self._mounts[name] = {one.filename: self._files[one.sha256_hex] for one in request.files}
        return api.MountGetOrCreateResponse(mount_id=name)

    async def SandboxCreateV2(self, request: Any) -> api.SandboxCreateV2Response:
        asked = request.definition
        assert list(asked.entrypoint_args) == ["sleep", "infinity"]
        rule = asked.network_access
        network: dict[str, Any] = {"block_network": rule.network_access_type == api.NetworkAccess.BLOCKED}
        if rule.network_access_type == api.NetworkAccess.ALLOWLIST:
            network["outbound_cidr_allowlist"] = list(rule.allowed_cidrs)
            network["outbound_domain_allowlist"] = list(rule.allowed_domains)
        env = {key: value for source in request.secret_sources for key, value in source.env.contents.items()}
        name = await self.cloud.boot(
            **self._images.get(asked.image_id, {"image": asked.image_id.removeprefix(_FROZEN)}),
            seconds=asked.timeout_secs,
            env=env,
            metadata={tag.tag_name: tag.tag_value for tag in request.tags},
            **network,
        )
        return api.SandboxCreateV2Response(sandbox_id=name, task_id=name, command_router_access=self._access)

    async def SandboxGetCommandRouterAccess(self, request: Any) -> api.SandboxGetCommandRouterAccessResponse:
        return api.SandboxGetCommandRouterAccessResponse(url=self._access.url, jwt=self._access.jwt)

    async def SandboxGetTaskIdV2(self, request: Any) -> api.SandboxGetTaskIdResponse:
        return api.SandboxGetTaskIdResponse(task_id=request.sandbox_id)

    async def SandboxListV2(self, request: Any) -> api.SandboxListResponse:
        told = [api.SandboxInfo(id=name, created_at=1.0 + number) for number, name in enumerate(self.cloud.running)]
        before = request.before_timestamp or float("inf")
        return api.SandboxListResponse(sandboxes=[one for one in reversed(told) if one.created_at < before])

    async def SandboxTagsGetV2(self, request: Any) -> api.SandboxTagsGetResponse:
        tags = self.cloud.created[self.cloud.numbers[request.sandbox_id]]["metadata"]
        told = [api.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        return api.SandboxTagsGetResponse(tags=told)

    async def SandboxTerminateV2(self, request: Any) -> api.SandboxTerminateResponse:
        await self.cloud.end(request.sandbox_id)
        return api.SandboxTerminateResponse()


class CommandRouter(_Service):
    """What runs in the sandboxes. A request that comes again, as after a lost answer, does nothing a second time."""

    base = TaskCommandRouterBase

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud)
        self._live: dict[str, Piped] = {}
        self._sent: dict[str, int] = {}
        self._frozen: dict[str, str] = {}

    def let_in(self, metadata: Any) -> bool:
        return str(metadata.get("authorization", "")).startswith("Bearer router.")

    async def TaskExecStart(self, request: Any) -> router.TaskExecStartResponse:
        if request.exec_id not in self._live:
            argv, seconds = list(request.command_args), request.timeout_secs or None
            self._live[request.exec_id] = self.cloud.start(request.task_id, argv, seconds)
        return router.TaskExecStartResponse()

    def _known(self, request: Any) -> Piped:
        if request.task_id not in self.cloud.running:
            raise self.cloud.gone(request.task_id)
        return self._live[request.exec_id]

    async def TaskExecStdioRead(self, request: Any) -> AsyncIterator[router.TaskExecStdioReadResponse]:
        kind = 1 if request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT else 2
        async for data in self._known(request).output(kind, request.offset):
            yield router.TaskExecStdioReadResponse(data=data)

    async def TaskExecStdinWrite(self, request: Any) -> router.TaskExecStdinWriteResponse:
        command, sent = self._known(request), self._sent.get(request.exec_id, 0)
        self._sent[request.exec_id] = max(sent, request.offset + len(request.data))
        await command.send(request.data[max(0, sent - request.offset) :])
        if request.eof:
            command.send_end()
        return router.TaskExecStdinWriteResponse()

    async def TaskExecWait(self, request: Any) -> router.TaskExecWaitResponse:
        code = await self._known(request).ended
        return router.TaskExecWaitResponse(signal=9) if code is None else router.TaskExecWaitResponse(code=code)

    async def TaskSnapshotFilesystem(self, request: Any) -> router.TaskSnapshotFilesystemResponse:
        if request.snapshot_id not in self._frozen:
            self._frozen[request.snapshot_id] = _FROZEN + await self.cloud.freeze(request.task_id)
        return router.TaskSnapshotFilesystemResponse(image_id=self._frozen[request.snapshot_id])

    async def close(self) -> None:
        for command in self._live.values():
            await command.kill()


@asynccontextmanager
async def serve(cloud: Cloud) -> AsyncIterator[None]:
    """Serve until the end of the block, to the SDK in this process."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:  # as asyncio must know, to send without a delay
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running = CommandRouter(cloud)
        server = Server([ControlPlane(cloud, url), running])
        await server.start(sock=listening)
        os.environ.update(MODAL_SERVER_URL=url, MODAL_TOKEN_ID=TOKEN[0], MODAL_TOKEN_SECRET=TOKEN[1])
        try:
            yield
        finally:
            await (await modal.Client.from_env.aio()).close.aio()  # it is kept for the process, and knows this address
            await running.close()
            server.close()
            await server.wait_closed()
