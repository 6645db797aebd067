"""The images that containers boot: pulled, built or made of this machine once, and prepared for the agent once."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.base import DOCKERFILE, Layer, SandboxSpec
from sandlot.sandbox.docker import build, host
from sandlot.sandbox.docker.sandbox import api_errors
from sandlot.sandbox.docker.spec import mounts, ulimits
from sandlot.sandbox.images import reference
from sandlot.sandbox.remote import owner, scripts
from sandlot.sandbox.remote.sandbox import AGENT_ID

if TYPE_CHECKING:
    import aiodocker

_PREPARED, _HOST, _BUILT = "localhost/sandlot-prepared", "localhost/sandlot-host", "localhost/sandlot-built"


class Images:
    """What the daemon has, and one lock for each image that is being made."""

    def __init__(self) -> None:
        self._making: dict[str, asyncio.Lock] = {}

    async def prepared(self, docker: aiodocker.Docker, spec: SandboxSpec) -> tuple[str, tuple[Layer, ...]]:
        """The image that a spec boots, with the agent's user and an owned work directory, and what to mount on it."""
        mounted: tuple[Layer, ...] = ()
        if spec.image == "host":
            name, mounted = await self._host(docker)
        elif spec.image.startswith(DOCKERFILE):
            name = await self._built(docker, spec.image.removeprefix(DOCKERFILE))
        else:
            reference.parse(spec.image)  # daemons differ in how they refuse what is no name
            name = spec.image.removeprefix("docker://")
            await self._pull(docker, name)
        with api_errors():
            source = str((await docker.images.inspect(name))["Id"])
        key = hashlib.sha256(f"1\0{source}\0{spec.workdir}".encode()).hexdigest()[:24]
        async with self._lock(key):
            if not await _has(docker, f"{_PREPARED}:{key}"):
                await _prepare(docker, name, key, spec, mounted)
        return f"{_PREPARED}:{key}", mounted

    async def _host(self, docker: aiodocker.Docker) -> tuple[str, tuple[Layer, ...]]:
        data, mounted = await asyncio.to_thread(host.skeleton, AGENT_ID)
        name = f"{_HOST}:{hashlib.sha256(data).hexdigest()[:24]}"
        async with self._lock(name):
            if not await _has(docker, name):
                params = {"fromSrc": "-", "repo": name}
                with api_errors():
                    async with docker._query("images/create", method="POST", params=params, data=data) as response:
                        await response.read()
        return name, mounted

    async def _built(self, docker: aiodocker.Docker, directory: str) -> str:
        """The image of a Dockerfile; built once for what the directory holds."""
        async with self._lock(directory):
            with tempfile.TemporaryFile() as context:
                name = f"{_BUILT}:{(await asyncio.to_thread(build.pack, directory, context))[:24]}"
                if not await _has(docker, name):
                    await build.build(docker, directory, context, name)
        return name

    async def _pull(self, docker: aiodocker.Docker, name: str) -> None:
        """Pull an image that the daemon does not have."""
        async with self._lock(name):
            if await _has(docker, name):
                return
            try:
                with api_errors():
                    await docker.images.pull(name)
                    await docker.images.inspect(name)
            except SandboxError as error:
                raise SandboxUnavailableError(
                    f"the daemon has no image {name} and cannot pull it ({error}); check the name, or log in"
                ) from error

    def _lock(self, key: str) -> asyncio.Lock:
        return self._making.setdefault(key, asyncio.Lock())


async def _has(docker: aiodocker.Docker, name: str) -> bool:
    try:
        with api_errors():
            await docker.images.inspect(name)
        return True
    except SandboxError as error:
        if getattr(error.__cause__, "status", 0) != 404:
            raise
        return False


async def _prepare(
    docker: aiodocker.Docker, name: str, key: str, spec: SandboxSpec, mounted: tuple[Layer, ...]
) -> None:
    config: dict[str, Any] = {
        "Image": name,
        "Entrypoint": scripts.make_user(AGENT_ID, spec.workdir),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": {**owner.labels(3600), owner.MINE: f"prepare-{key}"},
        "HostConfig": {"NetworkMode": "none", "Mounts": mounts(mounted), "Ulimits": ulimits(spec.limits)},
    }
    with api_errors():
        container = await docker.containers.create(config)
        try:
            try:
                await container.start()
            except Exception as error:
                if "/bin/sh" not in str(error):
                    raise
                raise SandboxUnavailableError(
                    f"the image {spec.image} cannot run /bin/sh; use one with a shell"
                ) from error
            code = (await container.wait())["StatusCode"]
            if code != 0:
                said = "".join(await container.log(stdout=True, stderr=True))
                raise SandboxUnavailableError(f"the image {spec.image} cannot be prepared: {said[-300:] or code}")
            changes = [f'LABEL sandlot.prepared="{key}"', f'LABEL {owner.MINE}=""']
            await container.commit(repository=_PREPARED, tag=key, changes=changes, config={}, pause=False)
        finally:
            await asyncio.shield(remove(docker, container.id))


async def remove(docker: aiodocker.Docker, container: str) -> None:
    """Remove a container, whatever it does, if it is there."""
    with suppress(SandboxError), api_errors():
        await docker.containers.container(container).delete(force=True, v=True)
