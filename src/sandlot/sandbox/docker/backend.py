"""Makes containers: prepares images once, passes every limit explicitly, and sweeps what dead owners left."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandlot.cache import cache_dir, locked
from sandlot.errors import MissingDependencyError, SandboxError, SandboxUnavailableError
from sandlot.sandbox.background import Background, all_of
from sandlot.sandbox.base import Check, Layer, Running, SandboxSpec, Snapshot
from sandlot.sandbox.docker import netns, seccomp
from sandlot.sandbox.docker.images import Images, remove
from sandlot.sandbox.docker.sandbox import DockerSandbox, api_errors
from sandlot.sandbox.docker.spec import check, mounts, ulimits
from sandlot.sandbox.remote import owner
from sandlot.sandbox.remote.sandbox import AGENT_ID

if TYPE_CHECKING:
    import aiodocker
    import aiohttp

_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "NET_BIND_SERVICE",
    "SETFCAP",
]
_PERIOD = 100_000
_SHM_BYTES = 1 << 30
_SNAPSHOT = "localhost/sandlot-snapshot"
_START_SECONDS = 120.0
_MARK = "SANDLOT_SANDBOX"
# On USR1 kills everything but itself and the init above it, by one call that needs no new process. stdin stays open.
_FIRST = "trap 'kill -9 -1; hit=1' USR1; while :; do hit=; read -r line || [ -n \"$hit\" ] || sleep 3600; done"


class DockerSnapshot:
    """See `Snapshot`: an image made of a container, and what of the machine was mounted on it."""

    def __init__(self, backend: DockerBackend, image: str, mounted: tuple[Layer, ...]) -> None:
        self.image, self.mounted = image, mounted
        self._backend = backend

    async def discard(self) -> None:
        """See `Snapshot.discard`."""
        await self._backend.remove_image(self.image)


class DockerBackend:
    """See `SandboxBackend`. The daemon is the one of `DOCKER_HOST` or of the current context, else a local socket.

    `runtime`: an OCI runtime that the daemon knows, such as `runsc`. `at_once`: containers started at the same time.
    """

    name = "docker"

    def __init__(self, host: str | None = None, *, runtime: str = "", at_once: int = 8) -> None:
        self._host, self._runtime = host or os.environ.get("DOCKER_HOST"), runtime
        self._starting = asyncio.Semaphore(at_once)
        self._connecting = asyncio.Lock()
        self._seccomp: list[str] = []
        self._docker: aiodocker.Docker | None = None
        self._connector: aiohttp.BaseConnector | None = None
        self._sandboxes: set[DockerSandbox] = set()
        self._images = Images()
        self._snapshots: set[str] = set()
        self._booted: Counter[str] = Counter()
        self._doomed: set[str] = set()
        self._background = Background()

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """See `SandboxBackend.create`."""
        check(spec)
        if spec.snapshot is not None and not isinstance(spec.snapshot, DockerSnapshot):
            raise SandboxUnavailableError("a container boots from snapshots of containers only")
        docker = await self._client()
        if isinstance(spec.snapshot, DockerSnapshot):
            image, mounted = spec.snapshot.image, spec.snapshot.mounted
        else:
            image, mounted = await self._images.prepared(docker, spec)
        spec = replace(spec, layers=(*mounted, *spec.layers))
        identity = secrets.token_hex(6)
        config = self._config(spec, image, identity)
        starting = self._start(docker, config, f"sandlot-{identity}")
        container, pid = await self._background.made(starting, lambda started: remove(docker, started[0]))
        here = await _found_here(pid, identity)
        facts = {
            "backend": self.name,
            "isolation": self._runtime or "container",
            "users": "range",
            "limits": {
                "tier": "container",
                "memory": "group",
                "processes": "group",
                "cpu": None if spec.limits.cpu is None else "group",
                "disk": "watch",
            },
            "network": spec.network,
            "gateway": "socket" if here else "relay",
            "seccomp": True,
            "image": spec.image if spec.snapshot is None else "snapshot",
        }
        sandbox = DockerSandbox(docker, container, identity, spec, facts, here, self._on_end, self._freeze, mounted)
        self._sandboxes.add(sandbox)
        if not isinstance(spec.snapshot, DockerSnapshot):
            return sandbox
        self._booted[image] += 1
        try:
            made = await sandbox.exec(["mkdir", "-p", spec.workdir], user="root", cwd="/")
            if not made.ok or not (await sandbox.exec(["test", "-w", "."])).ok:
                await sandbox.exec(["chown", f"{AGENT_ID}:{AGENT_ID}", spec.workdir], user="root", cwd="/")
        except BaseException:
            await asyncio.shield(sandbox.kill())
            raise
        return sandbox

    def _config(self, spec: SandboxSpec, image: str, identity: str) -> dict[str, Any]:
        limits = spec.limits
        host: dict[str, Any] = {
            "NetworkMode": "none",
            "Init": True,
            "CapDrop": ["ALL"],
            "CapAdd": _CAPABILITIES,
            "SecurityOpt": ["no-new-privileges", *self._seccomp],
            "Memory": limits.memory,
            "MemorySwap": limits.memory,
            "PidsLimit": limits.processes,
            "ShmSize": min(limits.memory // 4, _SHM_BYTES),
            "Ulimits": ulimits(limits),
            "Mounts": mounts(spec.layers),
        }
        if limits.cpu is not None:
            host |= {"CpuPeriod": _PERIOD, "CpuQuota": int(limits.cpu * _PERIOD)}
        if self._runtime:
            host["Runtime"] = self._runtime
        return {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", _FIRST],
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Hostname": "sandlot",
            "OpenStdin": True,
            "Env": [f"{_MARK}={identity}"],
            "Labels": {
                **{f"sandlot.label.{key}": value for key, value in spec.labels.items()},
                **owner.labels(limits.wall_clock),
                owner.MINE: identity,
                "sandlot.image": spec.image if spec.snapshot is None else "snapshot",
            },
            "HostConfig": host,
        }

    async def _start(self, docker: aiodocker.Docker, config: dict[str, Any], name: str) -> tuple[str, int]:
        """Create and start a container; its id and the number of its first process."""
        async with self._starting:
            with api_errors():
                container = await docker.containers.create(config, name=name)
                try:
                    async with asyncio.timeout(_START_SECONDS):
                        await container.start()
                        state = (await container.show())["State"]
                except BaseException as error:
                    await asyncio.shield(remove(docker, container.id))
                    if isinstance(error, TimeoutError):
                        raise SandboxError(f"the container did not start within {_START_SECONDS:g} s") from error
                    raise
        if not state["Running"]:
            await remove(docker, container.id)
            raise SandboxUnavailableError(f"the image {config['Image']} cannot run /bin/sh; use one with a shell")
        return container.id, int(state.get("Pid") or 0)

    async def _freeze(self, sandbox: DockerSandbox) -> Snapshot:
        changes = [f'LABEL {key}="{value}"' for key, value in {**owner.labels(7 * 86400), owner.MINE: ""}.items()]
        with api_errors():
            await sandbox.container.commit(
                repository=_SNAPSHOT, tag=sandbox.id, changes=changes, config={}, pause=False
            )
        self._snapshots.add(image := f"{_SNAPSHOT}:{sandbox.id}")
        return DockerSnapshot(self, image, sandbox.mounted)

    async def remove_image(self, image: str) -> None:
        """Remove the image of a snapshot, at once or when its last container ends."""
        if image not in self._snapshots:
            return
        self._doomed.add(image)
        if self._booted[image] > 0:
            return
        docker = await self._client()
        self._snapshots.discard(image)
        with suppress(SandboxError), api_errors():
            await docker.images.delete(image)

    async def _on_end(self, sandbox: DockerSandbox) -> None:
        self._sandboxes.discard(sandbox)
        if isinstance(sandbox.spec.snapshot, DockerSnapshot):
            image = sandbox.spec.snapshot.image
            self._booted[image] -= 1
            if image in self._doomed:
                await self.remove_image(image)

    async def running(self) -> list[Running]:
        """See `Lists.running`."""
        found = []
        docker = await self._client()
        with api_errors():
            containers = await docker.containers.list(filters={"label": [owner.MINE], "status": ["running"]})
        for container in containers:
            labels: dict[str, str] = container["Labels"]
            given = {k.removeprefix("sandlot.label."): v for k, v in labels.items() if k.startswith("sandlot.label.")}
            image = labels.get("sandlot.image", "")
            created = float(container["Created"]) if str(container["Created"]).isdigit() else time.time()
            found.append(Running(labels[owner.MINE], image, owner.name(labels), created, given))
        return sorted(found, key=lambda one: one.started)

    async def sweep(self) -> int:
        """See `SandboxBackend.sweep`."""
        docker = await self._client()
        removed = 0
        with api_errors():
            for container in await docker.containers.list(all=True, filters={"label": [owner.MINE]}):
                if owner.is_dead(container["Labels"]):
                    await remove(docker, container.id)
                    removed += 1
            for image in await docker.images.list(filters={"label": [owner.MINE]}):
                tags = [tag for tag in image.get("RepoTags") or [] if tag.startswith(f"{_SNAPSHOT}:")]
                if tags and owner.is_dead(image.get("Labels") or {}):
                    await docker.images.delete(tags[0], force=True)
        return removed

    async def doctor(self) -> list[Check]:
        """See `SandboxBackend.doctor`."""
        try:
            docker = await self._client()
            with api_errors():
                version = await docker.version()
        except MissingDependencyError as error:  # tells its cure
            return [Check("docker", False, str(error))]
        except SandboxError as error:
            return [Check("docker", False, str(error), "start Docker or Podman's service, or set DOCKER_HOST")]
        engine = (version.get("Components") or [{}])[0].get("Name", "Docker")
        answers = Check("docker", True, f"{engine} {version.get('Version')}, API {version.get('ApiVersion')}")
        try:
            async with await self.create(SandboxSpec(network="gateway")) as sandbox:
                await sandbox.exec(["true"])
                way = sandbox.facts["gateway"]
        except (SandboxError, OSError) as error:
            cure = "give the daemon the rights that the error names; on Debian `tools/podman-service.sh` sets Podman up"
            return [answers, Check("docker boots", False, str(error), cure)]
        return [answers, Check("docker boots", True, f"the gateway is reached by a {way}")]

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        try:
            await all_of(sandbox.kill() for sandbox in list(self._sandboxes))
            for image in list(self._snapshots):
                await self.remove_image(image)
        finally:
            await self._background.finish(_START_SECONDS)
            if self._docker is not None:
                await self._disconnect(self._docker)
                self._docker = None

    async def _client(self) -> aiodocker.Docker:
        async with self._connecting:
            if self._docker is None:
                docker = self._connect()
                try:
                    self._seccomp = await self._stricter(docker)
                except BaseException:
                    await self._disconnect(docker)
                    raise
                self._docker = docker  # only now: what boots must not lack the profile
        return self._docker

    def _connect(self) -> aiodocker.Docker:
        try:
            import aiodocker
            import aiohttp
        except ImportError as error:
            raise MissingDependencyError("aiodocker", "docker") from error
        try:
            if not self._host or not self._host.startswith("unix://"):
                return aiodocker.Docker(self._host)
            # Running commands hold a connection each, so these must not be limited.
            self._connector = aiohttp.UnixConnector(self._host.removeprefix("unix://"), limit=0)
            return aiodocker.Docker("unix://localhost", connector=self._connector)
        except (ValueError, AssertionError, OSError) as error:
            raise SandboxUnavailableError(
                "there is no Docker daemon here; start Docker or Podman's service, or set DOCKER_HOST"
            ) from error

    async def _disconnect(self, docker: aiodocker.Docker) -> None:
        await docker.close()
        if self._connector is not None:
            await self._connector.close()
            self._connector = None

    async def _stricter(self, docker: aiodocker.Docker) -> list[str]:
        """What makes Podman as strict as Docker; it takes the path of a profile where Docker takes its text."""
        with api_errors():
            version = await docker.version()
        names = [str(part.get("Name", "")) for part in version.get("Components") or []]
        profile = seccomp.strict_profile() if any("Podman" in name for name in names) else None
        if profile is None or not (self._host or "").startswith("unix://"):
            return []
        path = cache_dir() / "podman-seccomp.json"

        def write() -> None:
            with locked(path.with_suffix(".lock")):
                path.write_text(profile)

        await asyncio.to_thread(write)
        return [f"seccomp={path}"]


async def _found_here(pid: int, identity: str) -> int:
    """`pid` if it is the container's first process on this machine, else 0; it may still be about to become that."""
    for _ in range(50 if netns.exists(pid) else 0):
        if netns.is_here(pid, f"{_MARK}={identity}"):
            return pid
        await asyncio.sleep(0.02)
    return 0
