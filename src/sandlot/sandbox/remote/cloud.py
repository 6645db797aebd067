"""What the adapters of clouds share: refusals, the rate of creation, preparation, and the sweeping of what is left."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxLostError, SandboxUnavailableError, SandlotError
from sandlot.sandbox.background import Background, all_of
from sandlot.sandbox.base import DOCKERFILE, Check, SandboxSpec
from sandlot.sandbox.refusals import check_workdir
from sandlot.sandbox.remote import owner, scripts
from sandlot.sandbox.remote.cloud_sandbox import CloudSandbox, CloudSnapshot
from sandlot.sandbox.remote.machine import Machine
from sandlot.sandbox.remote.sandbox import AGENT_ID
from sandlot.sandbox.remote.spool import DIRECTORY
from sandlot.sandbox.remote.tunnel import Tunnel

_FINISH_SECONDS = 120.0
_TOOLS = "setpriv setsid mkfifo base64 head tail grep tar env nohup"


class CloudBackend(ABC):
    """See `SandboxBackend`. `advertise_url`: where sandboxes reach this process (see `Tunnel`); without it, the way to
    the gateway is a command's stdin and stdout (see `Relay`). `per_second`: sandboxes created at most.
    """

    name: str
    network_off = True
    """Whether the cloud can cut a sandbox off from every network."""
    streams = False
    """Whether its machines have `stream`."""
    snapshots = False
    """Whether its machines have `freeze`."""
    builds = False
    """Whether it takes `dockerfile:` and a directory for an image."""

    def __init__(self, *, advertise_url: str = "", bind: str = "", per_second: float = 5.0) -> None:
        self.tunnel = Tunnel(advertise_url, bind) if advertise_url else None
        self._interval = 1.0 / per_second
        self._next = 0.0
        self._sandboxes: set[CloudSandbox] = set()
        self._background = Background()

    @abstractmethod
    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """Create a sandbox with the image, environment, network rule, labels and lifetime of `spec`."""

    def source(self, spec: SandboxSpec) -> Any:
        """What of the cloud's a spec boots from: the source of a snapshot, or the name of an image."""
        if isinstance(spec.snapshot, CloudSnapshot):
            return spec.snapshot.source
        return spec.image.removeprefix("docker://")

    @abstractmethod
    async def examine(self) -> str:
        """Make a call that shows whether the account works; a word about it."""

    async def dead(self) -> list[Machine]:
        """Sandboxes whose labels name a dead owner; nothing where the cloud ends them by itself."""
        return []

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what the cloud cannot do."""
        if spec.snapshot is not None:
            if not isinstance(spec.snapshot, CloudSnapshot) or spec.snapshot.backend is not self:
                raise SandboxUnavailableError(
                    f"the {self.name} backend boots from no snapshots but its own; start from the image"
                )
        elif spec.image == "host" or spec.image.startswith("/"):
            raise SandboxUnavailableError(f"the {self.name} backend cannot boot {spec.image!r}; name an image it has")
        elif spec.image.startswith(DOCKERFILE) and not self.builds:
            raise SandboxUnavailableError(
                f"the {self.name} backend builds no Dockerfile; build the image, push it and name it, or use another"
            )
        if spec.network == "gateway" and self.tunnel is None and not self.streams:
            raise SandboxUnavailableError(
                f"{self.name} keeps no command's stdin open, over which the gateway could be reached; "
                "give an advertise_url that its sandboxes can dial"
            )
        if spec.network == "off" and not self.network_off:
            raise SandboxUnavailableError(f"the {self.name} backend cannot promise that a sandbox has no network")
        check_workdir(spec)

    async def create(self, spec: SandboxSpec) -> CloudSandbox:
        """See `SandboxBackend.create`."""
        self.check(spec)
        if self.tunnel is not None:
            await self.tunnel.start()
        now = time.monotonic()
        self._next = max(self._next, now) + self._interval
        await asyncio.sleep(self._next - self._interval - now)
        labels = {**spec.labels, **owner.labels(spec.limits.wall_clock)}
        machine, keep = await self._background.made(self._ready(spec, labels), lambda ready: ready[0].end())
        facts = {
            "backend": self.name,
            "isolation": "cloud",
            "users": "range",
            "limits": {"tier": "cloud"},
            "network": spec.network,
            "gateway": "relay" if self.tunnel is None else "tunnel",
            "image": spec.image if spec.snapshot is None else "snapshot",
        }
        sandbox = CloudSandbox(self, machine, spec, facts, keep)
        self._sandboxes.add(sandbox)
        return sandbox

    async def _ready(self, spec: SandboxSpec, labels: Mapping[str, str]) -> tuple[Machine, list[str]]:
        """Boot, and make the user and work directory; the processes that the cloud itself runs inside."""
        try:
            machine = await self.boot(spec, labels)
        except SandboxLostError as error:  # what the cloud did not find is not a sandbox yet
            raise SandboxUnavailableError(f"the {self.name} backend cannot boot {spec.image}: {error}") from error
        try:
            needed = _TOOLS + (" python3" if spec.network == "gateway" else "")
            line = f'[ "$(id -u)" = 0 ] || echo root; for t in {needed}; do command -v $t >/dev/null || echo $t; done'
            _, lacking = await machine.call(line, 60.0)
            if "root" in lacking.split():
                raise SandboxUnavailableError(f"the {self.name} backend needs images that start as root")
            if lacking.split():
                raise SandboxUnavailableError(f"the image {spec.image} lacks {', '.join(lacking.split())}")
            for layer in spec.layers:
                code, _ = await machine.call(f'[ -n "$(ls -A {shlex.quote(layer.mount_point)} 2>/dev/null)" ]', 60.0)
                if code != 0:
                    raise SandboxUnavailableError(
                        f"directories of this machine cannot be shared with {self.name}; put what belongs at "
                        f"{layer.mount_point} into the image"
                    )
            start = shlex.join(scripts.make_user(AGENT_ID, spec.workdir))
            # What an image brings there is not to be trusted; who owns /tmp could put another in its place.
            ours = f"rm -rf {DIRECTORY} && chown 0:0 /tmp && mkdir -m 700 {DIRECTORY}"
            code, said = await machine.call(f"{start} && {ours}", 300.0)
            if code != 0:
                raise SandboxUnavailableError(f"the image {spec.image} cannot be prepared: {said.strip()[-300:]}")
            _, listing = await machine.call(shlex.join(scripts.processes()), 60.0)
            return machine, re.findall(r"^\d+-\d+$", listing, re.MULTILINE)
        except BaseException:
            await asyncio.shield(machine.end())
            raise

    def forget(self, sandbox: CloudSandbox) -> None:
        """Told when a sandbox has ended."""
        self._sandboxes.discard(sandbox)

    async def sweep(self) -> int:
        """See `SandboxBackend.sweep`."""
        try:
            machines = await self.dead()
        except SandlotError:
            raise
        except Exception as error:  # an SDK's own
            raise SandboxError(f"the {self.name} backend cannot list its sandboxes: {error}") from error
        await all_of(machine.end() for machine in machines)
        return len(machines)

    async def doctor(self) -> list[Check]:
        """See `SandboxBackend.doctor`."""
        try:
            return [Check(self.name, True, await self.examine())]
        except MissingDependencyError as error:  # tells its cure
            return [Check(self.name, False, str(error))]
        except Exception as error:  # whatever an SDK raises is what the doctor is to show
            return [Check(self.name, False, f"{error}", "see the cloud's documentation on credentials")]

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        try:
            await all_of(sandbox.kill() for sandbox in list(self._sandboxes))
        finally:
            await self._background.finish(_FINISH_SECONDS)
            if self.tunnel is not None:
                await self.tunnel.close()
