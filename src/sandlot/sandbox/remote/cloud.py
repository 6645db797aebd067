"""What the adapters of clouds share: an adapter creates a sandbox, calls a shell line, puts a file, and ends it."""

from __future__ import annotations

import asyncio
import shlex
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox.base import AGENT_USER, Check, SandboxSpec, Snapshot
from sandlot.sandbox.remote import owner, scripts
from sandlot.sandbox.remote.process import Stream, new_mark
from sandlot.sandbox.remote.sandbox import AGENT_ID, RemoteSandbox
from sandlot.sandbox.remote.spool import DIRECTORY, SpooledStream
from sandlot.sandbox.remote.tunnel import FORWARDER, Tunnel

_SETPRIV = ("setpriv", f"--reuid={AGENT_ID}", f"--regid={AGENT_ID}", "--clear-groups", "--no-new-privs")
DOCKERFILE = "dockerfile:"
"""An image that begins so is the directory of a Dockerfile."""
_CALM_SECONDS = 5.0
_TOOLS = "setpriv setsid mkfifo base64 head tail grep tar env nohup"


@dataclass(frozen=True)
class Frozen:
    """Files that a cloud keeps: what boots from them, and what removes them."""

    source: Any
    remove: Callable[[], Awaitable[Any]]


class CloudSnapshot:
    """See `Snapshot`."""

    def __init__(self, backend: CloudBackend, frozen: Frozen) -> None:
        self.backend, self.source = backend, frozen.source
        self._frozen: Frozen | None = frozen

    async def discard(self) -> None:
        """See `Snapshot.discard`."""
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            await frozen.remove()


class Machine(ABC):
    """One sandbox of a cloud, as its SDK offers it."""

    id: str

    @abstractmethod
    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        """Run a shell line as root, once: its exit code and stdout. `SandboxLostError` when the sandbox is gone."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write a file as root."""

    async def stream(self, line: str) -> Stream:
        """Start a shell line as root whose stdin stays open, for backends that have `streams`."""
        raise NotImplementedError

    async def freeze(self) -> Frozen:
        """Keep the files as something to boot from, for backends that have `snapshots`."""
        raise NotImplementedError

    @abstractmethod
    async def end(self) -> None:
        """End the sandbox. May be repeated."""


class CloudSandbox(RemoteSandbox):
    """See `Sandbox`."""

    _shares_root = True

    def __init__(
        self, backend: CloudBackend, machine: Machine, spec: SandboxSpec, facts: Mapping[str, Any], keep: Sequence[int]
    ) -> None:
        super().__init__(machine.id, spec, facts)
        self._backend, self._machine, self._keep = backend, machine, keep
        self._secrets: list[str] = []
        self._calls: set[asyncio.Future[tuple[int, str]]] = set()
        self._calm, self._one_kill = asyncio.Event(), asyncio.Lock()
        self._calm.set()

    async def _open(self, argv: Sequence[str], *, user: str, env: Mapping[str, str], stdin: bytes) -> Stream:
        as_user = [*_SETPRIV, *argv] if user == AGENT_USER else list(argv)
        bounds = f'ulimit -c 0; ulimit -n {self.spec.limits.open_files} 2>/dev/null; exec "$@"'
        command = ["sh", "-c", bounds, "sh", *as_user]
        return await SpooledStream.start(self._call_in_calm, self._machine.put, env[scripts.MARK], command, env, stdin)

    async def _stream(self, argv: Sequence[str]) -> Stream:
        marked = ["env", f"{scripts.MARK}={new_mark()}", *argv]
        return await self._machine.stream(f"exec {shlex.join(marked)}")

    async def _call(self, line: str, seconds: float) -> tuple[int, str]:
        self._check_alive()
        try:
            return await self._machine.call(line, seconds)
        except SandboxLostError as error:
            self._reason = self._reason or str(error)
            raise

    async def _call_in_calm(self, line: str, seconds: float) -> tuple[int, str]:
        """A call that no kill meets, which would take it for a victim, and find new ones for ever."""
        await self._calm.wait()
        call = asyncio.ensure_future(self._call(line, seconds))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def _complete(self, argv: list[str], user: str) -> int:
        line = shlex.join([*_SETPRIV, *argv] if user == AGENT_USER else argv)
        async with self._one_kill:
            self._calm.clear()
            try:
                if self._calls:
                    await asyncio.wait(self._calls, timeout=_CALM_SECONDS)
                return (await self._call(line, 60.0))[0]
            finally:
                self._calm.set()

    async def _kill_all(self) -> None:
        # What the cloud itself runs in the sandbox stays.
        keep = [*self._keep, *(relay.pid for relay in self._relays if relay.pid)]
        if await self._complete(scripts.kill_all(keep), "root") != 0:
            raise SandboxError("some processes could not be killed; kill the sandbox")

    def listen(self, port: int) -> socket.socket:
        """See `Sandbox.listen`. A forwarder inside brings connections to the advertised address, if there is one."""
        if self.spec.network != "gateway" or self._backend.tunnel is None:
            return super().listen(port)
        self._check_alive()
        secret, listener = self._backend.tunnel.open()
        self._secrets.append(secret)
        self._opening.append(asyncio.create_task(self._forward(self._backend.tunnel, port, secret)))
        return listener

    async def snapshot(self) -> Snapshot:
        """See `Sandbox.snapshot`."""
        if not self._backend.snapshots:
            return await super().snapshot()
        try:
            await self.kill_processes()
            return CloudSnapshot(self._backend, await self._machine.freeze())
        finally:
            await self.kill()

    async def _forward(self, tunnel: Tunnel, port: int, secret: str) -> None:
        base = f"{DIRECTORY}/forward-{port}"
        await self._machine.put(f"{base}.py", FORWARDER.encode())
        await self._machine.put(f"{base}.secret", secret.encode())
        kind = "tls" if tunnel.tls else "plain"
        arguments = [f"{base}.py", str(port), tunnel.host, str(tunnel.port), kind, f"{base}.secret"]
        run = f"nohup setsid {shlex.join(['python3', *arguments])} >{base}.log 2>&1 </dev/null & echo $!"
        _, said = await self._call(f"chmod 600 {base}.*; {run}", 60.0)
        ready = f"[ -e {base}.secret.ready ] && exit 0"
        wait = f"for n in $(seq 100); do {ready}; sleep 0.1; done; tail -n 1 {base}.log; exit 1"
        code, log = await self._call(wait, 30.0)
        if code != 0:
            raise SandboxError(f"the forwarder of port {port} did not start: {log.strip()[-300:]}")
        self._keep = [*self._keep, *(int(pid) for pid in said.split() if pid.isdigit())]

    async def _destroy(self) -> None:
        for opening in self._opening:
            opening.cancel()
        for secret in self._secrets:
            assert self._backend.tunnel is not None
            self._backend.tunnel.forget(secret)
        try:
            await self._machine.end()
        finally:
            self._backend.forget(self)


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
        if not spec.workdir.startswith("/"):
            raise SandboxUnavailableError(f"the workdir {spec.workdir!r} is not an absolute path")

    async def create(self, spec: SandboxSpec) -> CloudSandbox:
        """See `SandboxBackend.create`."""
        self.check(spec)
        if self.tunnel is not None:
            await self.tunnel.start()
        now = time.monotonic()
        self._next = max(self._next, now) + self._interval
        await asyncio.sleep(self._next - self._interval - now)
        labels = {**spec.labels, **owner.labels(spec.limits.wall_clock)}
        booting = asyncio.ensure_future(self._ready(spec, labels))
        try:
            machine, keep = await asyncio.shield(booting)
        except asyncio.CancelledError:
            booting.add_done_callback(_abandon)
            raise
        facts = {
            "backend": self.name,
            "isolation": "cloud",
            "users": "range",
            "limits": {"tier": "cloud"},
            "network": spec.network,
            "image": spec.image if spec.snapshot is None else "snapshot",
        }
        sandbox = CloudSandbox(self, machine, spec, facts, keep)
        self._sandboxes.add(sandbox)
        return sandbox

    async def _ready(self, spec: SandboxSpec, labels: Mapping[str, str]) -> tuple[Machine, list[int]]:
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
            code, said = await machine.call(f"mkdir -p -m 711 {DIRECTORY} && {start}", 300.0)
            if code != 0:
                raise SandboxUnavailableError(f"the image {spec.image} cannot be prepared: {said.strip()[-300:]}")
            _, listing = await machine.call("cd /proc && echo [0-9]*", 60.0)
            return machine, [int(pid) for pid in listing.split() if pid.isdigit()]
        except BaseException:
            await asyncio.shield(machine.end())
            raise

    def forget(self, sandbox: CloudSandbox) -> None:
        """Told when a sandbox has ended."""
        self._sandboxes.discard(sandbox)

    async def sweep(self) -> int:
        """See `SandboxBackend.sweep`."""
        machines = await self.dead()
        await asyncio.gather(*(machine.end() for machine in machines))
        return len(machines)

    async def doctor(self) -> list[Check]:
        """See `SandboxBackend.doctor`."""
        try:
            return [Check(self.name, True, await self.examine())]
        except Exception as error:  # whatever an SDK raises is what the doctor is to show
            return [Check(self.name, False, f"{error}", "see the cloud's documentation on credentials")]

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        await asyncio.gather(*(sandbox.kill() for sandbox in list(self._sandboxes)))
        if self.tunnel is not None:
            await self.tunnel.close()


def _abandon(done: asyncio.Future[tuple[Machine, list[int]]]) -> None:
    if not done.cancelled() and done.exception() is None:
        machine, _ = done.result()
        task = asyncio.ensure_future(machine.end())
        _ending.add(task)
        task.add_done_callback(_ending.discard)


_ending: set[asyncio.Future[None]] = set()
