"""Sandboxes of E2B, and of gateways that speak its API: an image is a template."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxLostError
from sandlot.sandbox.base import SandboxSpec
from sandlot.sandbox.remote import owner
from sandlot.sandbox.remote.cloud import CloudBackend
from sandlot.sandbox.remote.machine import Frozen, Machine, errors_as
from sandlot.sandbox.remote.process import HandedStream, Stream

_EVERYWHERE = "0.0.0.0/0"
_LOST = ("NotFoundException", "SandboxNotFoundException", "SandboxNotRunningException")
_FINAL = ("AuthenticationException", "InvalidArgumentException", "TemplateException")


class _Machine(Machine):
    def __init__(self, sandbox: Any) -> None:
        self._sandbox, self.id = sandbox, str(sandbox.sandbox_id)

    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        try:
            result = await self._sandbox.commands.run(
                shlex.join(["sh", "-c", line]), user="root", cwd="/", timeout=seconds
            )
        except Exception as error:  # the SDK raises for exit codes, too, and its classes are not ours to import
            if (code := getattr(error, "exit_code", None)) is not None:
                return int(code), str(getattr(error, "stdout", ""))
            raise _ours(error) from error
        return int(result.exit_code), str(result.stdout)

    async def put(self, path: str, data: bytes) -> None:
        with errors_as(_ours):
            await self._sandbox.files.write(path, data, user="root", use_octet_stream=True)

    async def stream(self, line: str) -> Stream:
        handle: Any = None
        started = asyncio.Event()

        async def run(stream: HandedStream) -> None:
            nonlocal handle
            handle = await self._sandbox.commands.run(
                shlex.join(["sh", "-c", line]),
                background=True,
                stdin=True,
                user="root",
                cwd="/",
                timeout=0,
                on_stdout=stream.out,
                on_stderr=stream.err,
                retain_output=False,
            )
            started.set()
            await handle.wait()

        async def write(data: bytes) -> None:
            await started.wait()
            await handle.send_stdin(data)

        async def close() -> None:
            if handle is not None:
                await handle.kill()

        return HandedStream(run, write, close)

    async def freeze(self) -> Frozen:
        with errors_as(_ours):
            made = await self._sandbox.create_snapshot(mode="filesystem")
        return Frozen(made.snapshot_id, lambda: type(self._sandbox).delete_snapshot(made.snapshot_id))

    async def end(self) -> None:
        with suppress(SandboxLostError), errors_as(_ours):
            await self._sandbox.kill()


class E2BBackend(CloudBackend):
    """See `SandboxBackend`. `client`: the SDK's `AsyncSandbox`. `image_key`: for gateways that boot any image, the key
    of the metadata that names it; the template is then `template`.
    """

    name = "e2b"
    streams = snapshots = True

    def __init__(self, client: Any = None, *, image_key: str = "", template: str = "base", **options: Any) -> None:
        super().__init__(**options)
        self._client, self._image_key, self._template = client, image_key, template

    def _sdk(self) -> Any:
        if self._client is None:
            try:
                from e2b import AsyncSandbox  # type: ignore[import-not-found,unused-ignore]
            except ImportError as error:
                raise MissingDependencyError("e2b", "e2b") from error
            self._client = AsyncSandbox
        return self._client

    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """See `CloudBackend.boot`."""
        template, routed = self.source(spec), {}
        if self._image_key and spec.snapshot is None:
            template, routed = self._template, {self._image_key: template}
        network: dict[str, Any] = {"deny_out": [_EVERYWHERE]}
        if spec.network == "gateway" and self.tunnel is not None:
            network["allow_out"] = [self.tunnel.host]
        sdk = self._sdk()
        with errors_as(_ours):
            sandbox = await sdk.create(
                template=template,
                timeout=int(spec.limits.wall_clock),
                metadata={**labels, **routed},
                envs=dict(spec.env),
                network=network,
            )
        return _Machine(sandbox)

    async def dead(self) -> list[Machine]:
        """See `CloudBackend.dead`."""
        sdk = self._sdk()
        found: list[Machine] = []
        pages = sdk.list()
        while pages.has_next:
            for one in await pages.next_items():
                if owner.is_dead(one.metadata or {}):
                    found.append(_Machine(await sdk.connect(one.sandbox_id)))
        return found

    async def examine(self) -> str:
        """See `CloudBackend.examine`."""
        return f"{len(await self._sdk().list().next_items())} sandboxes run"


def _ours(error: Exception) -> SandboxError:
    name = type(error).__name__
    if name in _LOST:
        return SandboxLostError(f"the e2b sandbox is gone: {error}")
    return SandboxError(f"e2b: {name}: {error}", retryable=name not in _FINAL)
