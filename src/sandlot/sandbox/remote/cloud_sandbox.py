"""One sandbox of a cloud, made of what its adapter gives, and its frozen files."""

from __future__ import annotations

import asyncio
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.base import AGENT_USER, SandboxSpec, Snapshot
from sandlot.sandbox.remote import scripts
from sandlot.sandbox.remote.machine import Frozen, Machine
from sandlot.sandbox.remote.process import Stream, new_mark
from sandlot.sandbox.remote.sandbox import AGENT_ID, RemoteSandbox
from sandlot.sandbox.remote.spool import DIRECTORY, SpooledStream
from sandlot.sandbox.remote.tunnel import FORWARDER, Tunnel

if TYPE_CHECKING:
    from sandlot.sandbox.remote.cloud import CloudBackend

_SETPRIV = ("setpriv", f"--reuid={AGENT_ID}", f"--regid={AGENT_ID}", "--clear-groups", "--no-new-privs")
_CALM_SECONDS = 5.0


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


class CloudSandbox(RemoteSandbox):
    """See `Sandbox`."""

    _shares_root = True

    def __init__(
        self, backend: CloudBackend, machine: Machine, spec: SandboxSpec, facts: Mapping[str, Any], keep: Sequence[str]
    ) -> None:
        super().__init__(machine.id, spec, facts)
        self._backend, self._machine, self._keep = backend, machine, keep
        self._secrets: list[str] = []
        self._forwarders: list[int] = []
        self._calls: set[asyncio.Future[tuple[int, str]]] = set()
        self._calm, self._one_kill = asyncio.Event(), asyncio.Lock()
        self._calm.set()

    async def _open(self, argv: Sequence[str], *, user: str, env: Mapping[str, str], stdin: bytes) -> Stream:
        as_user = [*_SETPRIV, *argv] if user == AGENT_USER else list(argv)
        bounds = f'ulimit -c 0; ulimit -n {self.spec.limits.open_files} 2>/dev/null; exec "$@"'
        command = ["sh", "-c", bounds, "sh", *as_user]
        owner, mark = AGENT_ID if user == AGENT_USER else 0, env[scripts.MARK]
        return await SpooledStream.start(self._call_in_calm, self._machine.put, mark, command, env, stdin, owner)

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
        except SandboxError as error:
            if await self._machine.gone():
                self._reason = self._reason or f"the {self._backend.name} sandbox is gone: {error}"
                raise SandboxLostError(self._reason) from error
            raise

    async def _call_in_calm(self, line: str, seconds: float) -> tuple[int, str]:
        """A call that no kill meets, which would take it for a victim, and find new ones for ever."""
        await self._calm.wait()
        call = asyncio.ensure_future(self._call(line, seconds))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
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
        ours = [*self._forwarders, *(relay.pid for relay in self._relays if relay.pid)]
        if await self._complete(scripts.kill_all(self._keep, ours), "root") != 0:
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
        _, said = await self._call(run, 60.0)
        ready = f"[ -e {base}.secret.ready ] && exit 0"
        wait = f"for n in $(seq 100); do {ready}; sleep 0.1; done; tail -n 1 {base}.log; exit 1"
        code, log = await self._call(wait, 30.0)
        if code != 0:
            raise SandboxError(f"the forwarder of port {port} did not start: {log.strip()[-300:]}")
        self._forwarders += [int(pid) for pid in said.split() if pid.isdigit()]

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
