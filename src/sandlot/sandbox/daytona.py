"""Sandboxes of Daytona: an image of a registry or of a Dockerfile, or `snapshot:NAME`."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import socket
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxLostError
from sandlot.sandbox.base import DOCKERFILE, SandboxSpec
from sandlot.sandbox.remote import owner
from sandlot.sandbox.remote.cloud import CloudBackend
from sandlot.sandbox.remote.machine import Frozen, Machine, errors_as
from sandlot.sandbox.remote.process import HandedStream, Stream

_SNAPSHOT = "snapshot:"
_ENDED = ("destroyed", "destroying", "stopped", "stopping", "archived", "archiving", "error")
_LOST = ("DaytonaNotFoundError", "DaytonaGoneError")
_FINAL = ("DaytonaAuthenticationError", "DaytonaForbiddenError", "DaytonaBadRequestError")


class _Machine(Machine):
    def __init__(self, sdk: Any, client: Any, sandbox: Any) -> None:
        self._sdk, self._client, self._sandbox, self.id = sdk, client, sandbox, str(sandbox.id)

    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        with errors_as(_ours):
            # Its own shell may be zsh, which splits no words.
            result = await self._sandbox.process.exec(shlex.join(["sh", "-c", line]), cwd="/", timeout=int(seconds) + 1)
        return int(result.exit_code), str(result.result)

    async def put(self, path: str, data: bytes) -> None:
        with errors_as(_ours):
            await self._sandbox.fs.upload_file(data, path)

    async def gone(self) -> bool:
        """See `Machine.gone`. What was stopped is deleted; the proxy only says that it finds no address."""
        try:
            await self._sandbox.refresh_data()
        except Exception as error:
            return type(error).__name__ in _LOST
        return str(getattr(self._sandbox.state, "value", self._sandbox.state)) in _ENDED

    async def stream(self, line: str) -> Stream:
        process, session = self._sandbox.process, f"sandlot-{secrets.token_hex(6)}"
        request = self._sdk.SessionExecuteRequest(
            command=shlex.join(["sh", "-c", line]), run_async=True, suppress_input_echo=True
        )
        with errors_as(_ours):
            await process.create_session(session)
            command = (await process.execute_session_command(session, request)).cmd_id
        return HandedStream(
            lambda stream: process.get_session_command_logs_async(session, command, stream.out, stream.err),
            lambda data: process.send_session_command_input(session, command, data.decode()),
            lambda: process.delete_session(session),
        )

    async def freeze(self) -> Frozen:
        name = f"sandlot-{secrets.token_hex(6)}"
        with errors_as(_ours):
            await self._sandbox.create_snapshot(name, timeout=600)
        return Frozen(_SNAPSHOT + name, lambda: _deleted(self._client.snapshot.delete(name)))

    async def end(self) -> None:
        await _deleted(self._client.delete(self._sandbox))


class DaytonaBackend(CloudBackend):
    """See `SandboxBackend`. `client`: an `AsyncDaytona`. `sdk`: the module `daytona`."""

    name = "daytona"
    streams = snapshots = builds = True

    def __init__(self, client: Any = None, *, sdk: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._client, self._module = client, sdk

    def _sdk(self) -> Any:
        if self._module is None:
            try:
                import daytona  # type: ignore[import-not-found,unused-ignore]
            except ImportError as error:
                raise MissingDependencyError("daytona", "daytona") from error
            self._module = daytona
        if self._client is None:
            with errors_as(_ours):  # without credentials
                self._client = self._module.AsyncDaytona()
        return self._module

    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """See `CloudBackend.boot`."""
        sdk = self._sdk()
        limits, name = spec.limits, f"sandlot-{secrets.token_hex(12)}"
        common: dict[str, Any] = {
            "name": name,
            "os_user": "root",
            "env_vars": dict(spec.env),
            "labels": dict(labels),
            "ephemeral": True,
            "auto_stop_interval": 0,
            "ttl_minutes": max(1, int(limits.wall_clock / 60) + 1),
            "network_block_all": spec.network == "off" or self.tunnel is None,
        }
        if spec.network == "gateway" and self.tunnel is not None:
            common["network_allow_list"] = f"{await asyncio.to_thread(socket.gethostbyname, self.tunnel.host)}/32"
        with errors_as(_ours):
            image = self.source(spec)
            if image.startswith(_SNAPSHOT):
                params = sdk.CreateSandboxFromSnapshotParams(snapshot=image.removeprefix(_SNAPSHOT), **common)
            else:
                size = {"memory": max(1, limits.memory >> 30), "disk": max(1, limits.disk >> 30)}
                if limits.cpu is not None:
                    size["cpu"] = max(1, round(limits.cpu))
                if image.startswith(DOCKERFILE):
                    file = f"{image.removeprefix(DOCKERFILE)}/Dockerfile"
                    image = await asyncio.to_thread(sdk.Image.from_dockerfile, file, strict_context=True)
                params = sdk.CreateSandboxFromImageParams(image=image, resources=sdk.Resources(**size), **common)
            try:
                sandbox = await self._client.create(params, timeout=300)
            except Exception:
                await self._drop(name)
                raise
        return _Machine(self._module, self._client, sandbox)

    async def _drop(self, name: str) -> None:
        """Remove a sandbox that was perhaps created, but did not start."""
        with suppress(Exception):  # why it did not start is what is told
            await self._client.delete(await self._client.get(name))

    async def dead(self) -> list[Machine]:
        """See `CloudBackend.dead`."""
        self._sdk()
        found = [one async for one in self._client.list()]
        return [_Machine(self._module, self._client, one) for one in found if owner.is_dead(one.labels or {})]

    async def examine(self) -> str:
        """See `CloudBackend.examine`."""
        self._sdk()
        async for _ in self._client.list():
            break
        return "the account answers"

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        await super().close()
        if self._client is not None:
            await self._client.close()


async def _deleted(deleting: Awaitable[Any]) -> None:
    with suppress(SandboxLostError), errors_as(_ours):
        await deleting


def _ours(error: Exception) -> SandboxError:
    name = type(error).__name__
    if name in _LOST:
        return SandboxLostError(f"the daytona sandbox is gone: {error}")
    return SandboxError(f"daytona: {name}: {error}", retryable=name not in _FINAL)
