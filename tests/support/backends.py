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
from support.clouds import Cloud, a_cloud

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

    def __init__(self, inner: SandboxBackend, cloud: Cloud | None = None, **always: Any) -> None:
        self.inner, self.cloud, self._always = inner, cloud, always
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


@asynccontextmanager
async def opened(name: str) -> AsyncIterator[Any]:
    """A backend for tests by name, closed at the end of the block with all that stands behind it."""
    if name in CLOUDS:
        port = free_port()
        async with a_cloud(port) as cloud, serve(name, cloud):
            way = {"advertise_url": f"tcp://127.0.0.1:{port}", "bind": f"127.0.0.1:{port}"}
            async with _closing(HostImage(cloud_backend(name, cloud, **way), cloud, image="some-image")) as made:
                yield made
    elif name == "e2b-sdk":
        async with a_cloud() as cloud, importlib.import_module("support.e2b_server").serve(cloud):
            inner = SANDBOXES.get("e2b")(per_second=1000.0)
            async with _closing(HostImage(inner, cloud, image="some-image")) as made:
                yield made
    else:
        async with _closing(await _on_this_machine(name)) as made:
            yield made


async def _on_this_machine(name: str) -> Any:
    if name == "docker":
        from sandlot.sandbox.docker import DockerBackend

        return DockerBackend(await asyncio.to_thread(podman_host))
    if name == "harbor":
        from sandlot.sandbox.harbor import HarborBackend

        bridge = HarborBackend(LOCAL_ENVIRONMENT, kwargs={"image": "host"}, per_second=1000.0)
        return HostImage(bridge, image="some-image", network="off")
    return LocalBackend()


@asynccontextmanager
async def _closing(backend: Any) -> AsyncIterator[Any]:
    try:
        yield backend
    finally:
        await backend.close()


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
    options = {"per_second": 1000.0, **options}
    if name == "kubernetes":
        options |= {"isolated": True, "router": cloud.url}
    double = [e2b_double.e2b(cloud)] if name == "e2b" else []
    return cast("SandboxBackend", SANDBOXES.get(name)(*double, **options))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
