"""The backends that the contract suite runs over, and how each boots the machine's own programs."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from sandlot.sandbox import SANDBOXES, Check, Sandbox, SandboxBackend, SandboxSpec
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.remote import owner
from support import e2b_double
from support.clouds import Cloud

MODAL = ["modal"] if importlib.util.find_spec("modal") else []
DAYTONA = ["daytona"] if importlib.util.find_spec("daytona") else []
KUBERNETES = ["kubernetes"] if importlib.util.find_spec("k8s_agent_sandbox") else []
WIRED = [*MODAL, *DAYTONA, *KUBERNETES]
"""Clouds by their official SDKs with servers that speak their wires, where Python has them."""
CLOUDS = ["e2b", *WIRED]
"""E2B's by a double of its SDK."""
HARBOR = ["harbor"] if importlib.util.find_spec("harbor") else []
"""Harbor's environments, where Python has Harbor; there is one for this machine, our own."""
SDK = ["e2b-sdk"] if importlib.util.find_spec("e2b") else []
"""E2B by its official SDK, likewise."""
ON_THIS_MACHINE = ["local", pytest.param("docker", marks=pytest.mark.slow)]
EVERYWHERE = ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("docker", *WIRED, *HARBOR, *SDK))]
"""Modules that name this as `BACKENDS` are run over all of them."""
FREEZING = [
    *ON_THIS_MACHINE,
    *(pytest.param(name, marks=pytest.mark.slow) for name in (*MODAL, *DAYTONA, *SDK)),
]
"""Those that keep the files of a sandbox."""
MAKER = owner.labels(0)["sandlot.owner"]
"""Us, among the processes that use a daemon."""

FROM_REMOTE = {"SANDLOT_EXEC", "SANDLOT_SANDBOX", "container", "HOSTNAME", "TERM"}
"""Variables that container runtimes and the way there add to a command's environment."""
LOCAL_ENVIRONMENT = "sandlot.sandbox.harbor.environment:LocalEnvironment"
PODMAN = Path(__file__).parents[2] / "tools/podman-service.sh"


class HostImage:
    """A cloud whose image `host` is what the double boots, for suites that name no other."""

    cloud: Cloud

    def __init__(self, inner: SandboxBackend, **always: Any) -> None:
        self.inner, self._always = inner, always
        self.name = inner.name

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.image == "host":
            spec = dataclasses.replace(spec, **self._always)
        return await self.inner.create(spec)

    async def doctor(self) -> list[Check]:
        return await self.inner.doctor()

    async def sweep(self) -> int:
        return await self.inner.sweep()

    async def close(self) -> None:
        await self.inner.close()


def podman_host() -> str:
    """DOCKER_HOST of a daemon for tests; skips where there is none."""
    if host := os.environ.get("SANDLOT_TEST_DOCKER_HOST"):
        return host
    done = subprocess.run([PODMAN], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no Docker daemon for tests: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


async def open_backend(name: str) -> tuple[Any, Any]:
    """A backend for tests by name, and what cleans up before it is closed."""

    async def nothing() -> None: ...

    if name == "docker":
        from sandlot.sandbox.docker import DockerBackend

        return DockerBackend(await asyncio.to_thread(podman_host)), nothing
    if name in CLOUDS:
        local = LocalBackend()
        port = _free_port()
        cloud = Cloud(local, port)
        serving = serve(name, cloud)
        await serving.__aenter__()
        address = f"tcp://127.0.0.1:{port}"
        backend = cloud_backend(name, cloud, advertise_url=address, bind=f"127.0.0.1:{port}", per_second=1000.0)

        async def end() -> None:
            await backend.close()
            await serving.__aexit__(None, None, None)
            await cloud.close()
            await local.close()

        host = HostImage(backend, image="some-image")
        host.cloud = cloud
        return host, end
    if name == "e2b-sdk":
        return await _with_e2bs_sdk()
    if name == "harbor":
        from sandlot.sandbox.harbor import HarborBackend

        kwargs = {"image": "host"}
        bridge = HarborBackend(LOCAL_ENVIRONMENT, kwargs=kwargs, per_second=1000.0)
        return HostImage(bridge, image="some-image", network="off"), nothing

    return LocalBackend(), nothing


async def _with_e2bs_sdk() -> tuple[Any, Any]:
    from e2b import AsyncSandbox  # type: ignore[import-not-found,unused-ignore]

    from sandlot.sandbox.e2b import E2BBackend
    from support import e2b_server

    local = LocalBackend()
    cloud = Cloud(local)
    serving = e2b_server.serve(cloud)
    url = await serving.__aenter__()
    os.environ.update(E2B_API_KEY=e2b_server.KEY, E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_HTTP_VERSION="1.1")

    async def end() -> None:
        await serving.__aexit__(None, None, None)
        await cloud.close()
        await local.close()

    host = HostImage(E2BBackend(AsyncSandbox, per_second=1000.0), image="some-image")
    host.cloud = cloud
    return host, end


@asynccontextmanager
async def serve(name: str, cloud: Cloud) -> AsyncIterator[None]:
    """What the official SDK of a cloud speaks to, where it is the SDK that is used."""
    if name not in WIRED:
        yield
        return
    async with importlib.import_module(f"support.{name}_server").serve(cloud):
        yield


def cloud_backend(name: str, cloud: Cloud, **options: Any) -> SandboxBackend:
    """The adapter of a cloud on the double of its SDK, or on the SDK itself while `serve` runs."""
    if name == "kubernetes":
        options |= {"isolated": True, "router": cloud.url}
    double = [e2b_double.e2b(cloud)] if name == "e2b" else []
    return cast("SandboxBackend", SANDBOXES.get(name)(*double, **options))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
