"""A sandbox made of one ability: to run a command and stream its output. Backends add what their API does better."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.background import Background
from sandlot.sandbox.base import AGENT_USER, ExecResult, SandboxSpec, Snapshot
from sandlot.sandbox.refusals import argv_of, home_of
from sandlot.sandbox.remote import scripts, tars
from sandlot.sandbox.remote.process import RemoteProcess, Stream, new_mark
from sandlot.sandbox.remote.relay import Relay

AGENT_ID = 1000
_IDS = {"root": 0, AGENT_USER: AGENT_ID}
_FILE_SECONDS = 120.0
_KILL_SECONDS = 60.0
_BACKGROUND = Background()


class RemoteSandbox(ABC):
    """See `Sandbox`."""

    _shares_root = False
    """Whether whoever runs the sandbox has processes of root in it, which are not to be killed."""

    def __init__(self, identity: str, spec: SandboxSpec, facts: Mapping[str, Any]) -> None:
        self.id, self.spec, self.facts = identity, spec, facts
        self._reason: str | None = None
        self._killing: asyncio.Task[None] | None = None
        self._clock: asyncio.Task[None] | None = None
        self._relays: list[Relay] = []
        self._opening: list[asyncio.Future[None]] = []
        self._killing_all = asyncio.Lock()
        if spec.limits.wall_clock != float("inf"):
            self._clock = asyncio.create_task(self._end_at_last())

    @abstractmethod
    async def _open(self, argv: Sequence[str], *, user: str, env: Mapping[str, str], stdin: bytes) -> Stream:
        """Start a command as a user, with these variables besides the image's. Never repeated.

        `stdin` is also written to the stream afterwards, for APIs that want it so.
        """

    async def _stream(self, argv: Sequence[str]) -> Stream:
        """Start a command as root whose stdin stays open to `Stream.write`."""
        raise SandboxError(
            f"the {self.facts['backend']} backend keeps no command's stdin open, over which the gateway can be reached",
            retryable=False,
        )

    @abstractmethod
    async def _destroy(self) -> None:
        """End the sandbox, whatever runs in it."""

    async def __aenter__(self) -> RemoteSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    def lost(self) -> str | None:
        """Why the sandbox is gone, None while it lives."""
        return self._reason

    async def why_lost(self) -> str | None:
        """See `Owner.why_lost`. Backends look whether the sandbox is there."""
        return self._reason

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = 60.0,
    ) -> ExecResult:
        """See `Sandbox.exec`. Daemons that the command left behind live on until `kill_processes`."""
        process = await self.spawn(command, user=user, cwd=cwd, env=env, stdin=stdin)
        return await self._waited(process, timeout)

    async def spawn(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> RemoteProcess:
        """See `Sandbox.spawn`."""
        cwd, env = cwd or self.spec.workdir, {**self.spec.env, **(env or {})}
        argv = argv_of(command, cwd, env)
        if any(not _is_text(text) for pair in ((*argv, cwd), *env.items()) for text in pair):
            raise SandboxError(
                f"the {self.facts['backend']} backend carries commands as text; put bytes that are none into a file",
                retryable=False,
            )
        return await self._start(scripts.wrapped(argv, cwd, len(stdin)), user, env, stdin)

    async def _start(
        self,
        argv: list[str],
        user: str,
        env: Mapping[str, str],
        stdin: bytes,
        limit: int | None = None,
        sink: IO[bytes] | None = None,
    ) -> RemoteProcess:
        home = home_of(user)
        self._check_alive()
        for way_back in self._opening:
            await asyncio.shield(way_back)
        mark = new_mark()
        variables = {"HOME": home, "USER": user, "LANG": "C.UTF-8", **env, scripts.MARK: mark}
        process = RemoteProcess(self, mark, user, self.spec.limits.output if limit is None else limit, sink)

        async def abandon(stream: Stream) -> None:
            process.follow(stream, stdin)
            await process.kill()

        opening = self._open(argv, user=user, env=variables, stdin=stdin)
        process.follow(await _BACKGROUND.made(opening, abandon), stdin)
        return process

    async def _waited(self, process: RemoteProcess, timeout: float | None) -> ExecResult:
        try:
            return await process.wait(timeout)
        except asyncio.CancelledError:
            _BACKGROUND.begin(process.kill())
            raise

    async def _helper(
        self,
        argv: list[str],
        *,
        user: str = "root",
        stdin: bytes = b"",
        limit: int | None = None,
        sink: IO[bytes] | None = None,
    ) -> ExecResult:
        """Run one of our scripts, which take their stdin by count."""
        process = await self._start(scripts.wrapped(argv, "/", None if stdin else 0), user, {}, stdin, limit, sink)
        result = await self._waited(process, _FILE_SECONDS)
        if result.timed_out:
            raise SandboxError(f"a call on files made no progress for {_FILE_SECONDS:g} s")
        return result

    async def kill_marked(self, mark: str, seconds: float, user: str) -> None:
        """See `Owner.kill_marked`. What cannot be caught takes everything else along."""
        try:
            strict = user == "root" and self._shares_root
            code = await self._complete(scripts.kill_tree(mark, int(seconds * 100) + 1, strict=strict), user)
        except (SandboxError, TimeoutError, OSError):
            code = scripts.ESCAPED
        if code != 0 and self.lost() is None:
            await self.kill_processes()

    async def _complete(self, argv: list[str], user: str) -> int:
        """Run a script whose output does not matter; its exit code."""
        env = {scripts.MARK: new_mark()}
        stream = await self._open(scripts.wrapped(argv, "/", 0), user=user, env=env, stdin=b"")
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                while await stream.read() is not None:
                    pass
                code = await stream.exit_code()
                while code is None:
                    await asyncio.sleep(0.02)
                    code = await stream.exit_code()
                return code
        finally:
            await stream.close()

    async def out_of_memory(self, code: int) -> bool:
        """See `Owner.out_of_memory`."""
        return False

    async def kill_processes(self) -> None:
        """See `Sandbox.kill_processes`."""
        self._check_alive()
        async with self._killing_all:
            await self._kill_all()

    async def _kill_all(self) -> None:
        try:
            code = await self._complete(scripts.kill_all(), "root")
        except TimeoutError:
            code = scripts.ESCAPED
        if code != 0:
            raise SandboxError("some processes could not be killed; kill the sandbox")

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See `Sandbox.read_file`."""
        path = self._absolute(path)
        result = await self._helper(scripts.read_file(path, max_bytes), limit=max_bytes + 1)
        self._check_file(result, path)
        if len(result.stdout) > max_bytes:
            raise SandboxError(f"{path} is larger than {max_bytes} bytes", retryable=False)
        return result.stdout

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644, user: str = AGENT_USER) -> None:
        """See `Sandbox.write_file`."""
        path = self._absolute(path)
        result = await self._helper(scripts.write_file(path, len(data), mode), user=user, stdin=data)
        self._check_file(result, path)

    async def upload_tar(self, path: str, data: bytes | Path, *, user: str = AGENT_USER) -> None:
        """See `Sandbox.upload_tar`."""
        path = self._absolute(path)
        whole = data if isinstance(data, bytes) else await asyncio.to_thread(data.read_bytes)
        archive, listing = await asyncio.to_thread(tars.checked, whole, _IDS.get(user, 0))
        self._check_file(await self._helper(scripts.clear_way(path, len(listing)), user=user, stdin=listing), path)
        self._check_file(await self._helper(scripts.unpack(path, len(archive)), user=user, stdin=archive), path)

    async def download_tar(
        self, path: str, *, exclude_names: Sequence[str] = (), max_bytes: int = 2 << 30
    ) -> AsyncIterator[bytes]:
        """See `Sandbox.download_tar`. Layers below `path` are left out."""
        path = self._absolute(path)
        mounts = _mounts_below(self.spec, path)
        with tempfile.TemporaryFile() as spool:
            await self._pack(path, spool, exclude_names, max_bytes)
            await asyncio.to_thread(spool.seek, 0)
            pieces = tars.rewritten(spool, frozenset(exclude_names), mounts, max_bytes)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece

    async def _pack(self, path: str, spool: IO[bytes], exclude: Sequence[str], max_bytes: int) -> None:
        """Write the directory as a tar to `spool`."""
        limit = max_bytes + (64 << 20)
        result = await self._helper(scripts.pack(path, exclude, limit + 1), limit=limit, sink=spool)
        self._check_file(result, path)
        if result.truncated:
            raise SandboxError(f"{path} is larger than {max_bytes} bytes", retryable=False)

    def listen(self, port: int) -> socket.socket:
        """See `Sandbox.listen`. A relay inside brings connections here; the next command waits until it runs."""
        if self.spec.network != "gateway":
            raise SandboxError('this sandbox has no network; create it with network="gateway"', retryable=False)
        self._check_alive()
        relay = Relay(self._start_relay, port)
        self._relays.append(relay)
        self._opening.append(relay.ready)
        return relay.listener

    async def _start_relay(self, argv: Sequence[str]) -> Stream:
        async with self._killing_all:  # one that comes back in the middle would never let that end
            return await self._stream(argv)

    async def snapshot(self) -> Snapshot:
        """See `Sandbox.snapshot`."""
        raise SandboxError(f"the {self.facts['backend']} backend cannot freeze files; start afresh", retryable=False)

    async def kill(self) -> None:
        """See `Sandbox.kill`."""
        if self._killing is None:
            self._reason = self._reason or "it was killed"
            if self._clock is not None and self._clock is not asyncio.current_task():
                self._clock.cancel()
            for relay in self._relays:
                relay.close()
            self._killing = asyncio.create_task(self._destroy())
        await asyncio.shield(self._killing)

    async def _end_at_last(self) -> None:
        await asyncio.sleep(self.spec.limits.wall_clock)
        self._reason = f"the wall clock limit of {self.spec.limits.wall_clock:g} s is over"
        await self.kill()

    def _check_alive(self) -> None:
        if (reason := self.lost()) is not None:
            raise SandboxLostError(f"the sandbox is gone: {reason}")

    def _check_file(self, result: ExecResult, path: str) -> None:
        if result.exit_code == scripts.NOT_FOUND:
            raise FileNotFoundError(2, "No such file or directory in the sandbox", path)
        if result.exit_code == scripts.NOT_REGULAR:
            raise SandboxError(f"{path} is not a regular file", retryable=False)
        if not result.ok:
            said = result.stderr.decode("utf-8", "replace").strip().splitlines()
            raise SandboxError(f"{path}: {said[0] if said else f'exit {result.exit_code}'}", retryable=False)

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise SandboxError("a path cannot hold a NUL byte", retryable=False)
        return os.path.join(self.spec.workdir, path)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _mounts_below(spec: SandboxSpec, path: str) -> tuple[str, ...]:
    below = (os.path.relpath(layer.mount_point, path) for layer in spec.layers)
    return tuple(mount for mount in below if not mount.startswith(".."))
