"""Sandboxes of Modal: an image is one of any registry, or built of a Dockerfile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox.base import DOCKERFILE, SandboxSpec
from sandlot.sandbox.remote import owner
from sandlot.sandbox.remote.cloud import CloudBackend
from sandlot.sandbox.remote.machine import Frozen, Machine, errors_as
from sandlot.sandbox.remote.process import HandedStream, Stream

_SNAPSHOT_SECONDS = 7 * 86_400


class _Machine(Machine):
    def __init__(self, sandbox: Any) -> None:
        self._sandbox, self.id = sandbox, str(sandbox.object_id)

    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        with errors_as(_ours):
            # As text, bytes that are none would be refused.
            process = await self._sandbox.exec.aio("sh", "-c", line, text=False, timeout=int(seconds) + 1)
            said = bytes(await process.stdout.read.aio())
            return int(await process.wait.aio()), said.decode("utf-8", "replace")

    async def put(self, path: str, data: bytes) -> None:
        with errors_as(_ours):
            process = await self._sandbox.exec.aio("sh", "-c", 'cat >"$1"', "sh", path, text=False, timeout=600)
            for start in range(0, len(data), 1 << 20):
                process.stdin.write(data[start : start + (1 << 20)])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            code = int(await process.wait.aio())
        if code != 0:
            raise SandboxError(f"{path} could not be written: exit {code}")

    async def stream(self, line: str) -> Stream:
        with errors_as(_ours):
            process = await self._sandbox.exec.aio("sh", "-c", line, text=False)

        async def pass_on(source: Any, take: Callable[[bytes], Awaitable[None]]) -> None:
            async for data in source:
                await take(data)

        async def run(stream: HandedStream) -> None:
            await asyncio.gather(pass_on(process.stdout, stream.out), pass_on(process.stderr, stream.err))

        async def write(data: bytes) -> None:
            process.stdin.write(data)
            await process.stdin.drain.aio()

        async def close() -> None:
            process.stdin.write_eof()
            await process.stdin.drain.aio()

        return HandedStream(run, write, close)

    async def freeze(self) -> Frozen:
        with errors_as(_ours):
            image = await self._sandbox.snapshot_filesystem.aio(timeout=600, ttl=_SNAPSHOT_SECONDS)

        async def nothing() -> None:
            """It ends by itself."""

        return Frozen(image, nothing)

    async def end(self) -> None:
        with suppress(SandboxLostError), errors_as(_ours):
            await self._sandbox.terminate.aio()


class ModalBackend(CloudBackend):
    """See `SandboxBackend`. `sdk`: the module `modal`. `app`: the app that sandboxes belong to."""

    name = "modal"
    streams = snapshots = builds = True

    def __init__(self, sdk: Any = None, *, app: str = "sandlot", **options: Any) -> None:
        super().__init__(**options)
        self._modal, self._app_name = sdk, app
        self._app: Any = None
        self._looking = asyncio.Lock()

    def _sdk(self) -> Any:
        if self._modal is None:
            try:
                import modal  # type: ignore[import-not-found,unused-ignore]
            except ImportError as error:
                raise MissingDependencyError("modal", "modal") from error
            self._modal = modal
        return self._modal

    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """See `CloudBackend.boot`."""
        sdk = self._sdk()
        network: dict[str, Any] = {"block_network": True}
        if spec.network == "gateway" and self.tunnel is not None:
            network = {"outbound_domain_allowlist": [self.tunnel.host]}
            if self.tunnel.host.replace(".", "").isdigit():
                network = {"outbound_cidr_allowlist": [f"{self.tunnel.host}/32"]}
        limits, source = spec.limits, self.source(spec)
        with errors_as(_ours):
            sandbox = await sdk.Sandbox.create.aio(
                "sleep",
                "infinity",
                app=await self._looked_up(),
                image=self._image(source),
                tags=dict(labels),
                timeout=min(int(limits.wall_clock), 86_400),
                cpu=limits.cpu,
                memory=(min(512, limits.memory >> 20), limits.memory >> 20),
                env=dict(spec.env),
                **network,
            )
        return _Machine(sandbox)

    def _image(self, source: Any) -> Any:
        if not isinstance(source, str):
            return source
        if source.startswith(DOCKERFILE):
            directory = source.removeprefix(DOCKERFILE)
            return self._sdk().Image.from_dockerfile(f"{directory}/Dockerfile", context_dir=directory)
        return self._sdk().Image.from_registry(source)

    async def dead(self) -> list[Machine]:
        """See `CloudBackend.dead`."""
        sdk, found = self._sdk(), list[Machine]()
        with errors_as(_ours):
            app = await self._looked_up()
            async for one in sdk.Sandbox.list.aio(app_id=app.app_id):
                if owner.is_dead(await _tags(one)):
                    found.append(_Machine(one))
        return found

    async def examine(self) -> str:
        """See `CloudBackend.examine`."""
        return f"app {(await self._looked_up()).app_id}"

    async def _looked_up(self) -> Any:
        async with self._looking:
            self._app = self._app or await self._sdk().App.lookup.aio(self._app_name, create_if_missing=True)
        return self._app


async def _tags(sandbox: Any) -> Mapping[str, str]:
    tags: Mapping[str, str] = {}
    with suppress(SandboxLostError), errors_as(_ours):  # it may have ended since it was listed
        tags = await sandbox.get_tags.aio()
    return tags


def _ours(error: Exception) -> SandboxError:
    name = type(error).__name__
    if name in ("NotFoundError", "SandboxTerminatedError", "SandboxTimeoutError"):
        return SandboxLostError(f"the modal sandbox is gone: {error}")
    if name == "ImageBuildError":
        return SandboxUnavailableError(f"modal cannot build the image: {' '.join(str(error).split())}")
    return SandboxError(f"modal: {name}: {error}", retryable=name not in ("AuthError", "InvalidError"))
