"""The backends that the contract suite runs over, and how each boots the machine's own programs."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandlot.sandbox import Layer, Sandbox, SandboxBackend, SandboxSpec
from sandlot.sandbox.local import LocalBackend
from support.image_files import Entry, directory, make_tar

EVERYWHERE = ["local", pytest.param("docker", marks=pytest.mark.slow)]
"""Modules that name this as `BACKENDS` are run over all of them."""

FROM_REMOTE = {"SANDLOT_EXEC", "SANDLOT_SANDBOX", "container", "HOSTNAME", "TERM"}
"""Variables that container runtimes and the way there add to a command's environment."""
PODMAN = Path(__file__).parents[2] / "tools/podman-service.sh"
_ROOT: list[Entry] = [
    *((name, f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin")),
    *((name, directory()) for name in ("etc", "opt", "root", "run", "srv", "usr", "var/tmp", "home", "mnt")),
    ("tmp", directory(0o1777)),
    ("etc/hostname", b"sandlot\n"),
    ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
    ("etc/group", b"root:x:0:\n"),
]
"""An image without a program: /usr is a layer of the machine's."""


class HostImage:
    """A backend whose `host` image is a bare one with the machine's /usr as a layer, for those that have none."""

    def __init__(self, inner: SandboxBackend, image: str) -> None:
        self.inner, self._image = inner, image
        self.name = inner.name

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.snapshot is not None or spec.image == "host":
            usr = Layer(Path("/usr"), "/usr")
            image = self._image if spec.snapshot is None else spec.image
            alternatives = Layer(Path("/etc/alternatives"), "/etc/alternatives")
            spec = dataclasses.replace(spec, image=image, layers=(usr, alternatives, *spec.layers))
        return await self.inner.create(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def podman_host() -> str:
    """DOCKER_HOST of a daemon for tests; skips where there is none."""
    if host := os.environ.get("SANDLOT_TEST_DOCKER_HOST"):
        return host
    done = subprocess.run([PODMAN], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no Docker daemon for tests: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


async def docker_backend() -> tuple[HostImage, Any]:
    """A docker backend on the test daemon with a bare image, and what removes that again."""
    from sandlot.sandbox.docker import DockerBackend

    backend = DockerBackend(await asyncio.to_thread(podman_host))
    docker = await backend._client()
    name = f"localhost/sandlot-test-{secrets.token_hex(4)}"
    params = {"fromSrc": "-", "repo": name}
    data = io.BytesIO(make_tar(_ROOT))
    async with docker._query("images/create", method="POST", params=params, data=data) as response:
        await response.read()

    async def clean() -> None:
        async with docker._query("images/json") as response:
            for image in await response.json():
                for found in image.get("RepoTags") or []:
                    if found == f"{name}:latest" or found.startswith("localhost/sandlot-prepared:"):
                        await docker.images.delete(found, force=True)

    return HostImage(backend, f"{name}:latest"), clean


async def open_backend(name: str) -> tuple[Any, Any]:
    """A backend for tests by name, and what cleans up before it is closed."""
    if name == "docker":
        return await docker_backend()

    async def nothing() -> None: ...

    return LocalBackend(), nothing
