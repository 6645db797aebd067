"""A running local sandbox, seen from Sandlot."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.base import AGENT_USER, ExecResult, SandboxSpec, Snapshot
from sandlot.sandbox.jail import wire
from sandlot.sandbox.local import aio
from sandlot.sandbox.local.process import LocalProcess
from sandlot.sandbox.refusals import argv_of, home_of

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FILE_SECONDS = 300.0
_END_SECONDS = 60.0
_INLINE_READ = 1 << 20


class LocalSandbox:
    """See `Sandbox`. Two sockets of ours hold it: the control stream to its init, the life channel to its keeper."""

    def __init__(
        self,
        identity: str,
        spec: SandboxSpec,
        facts: Mapping[str, Any],
        life: socket.socket,
        control: socket.socket,
        owners: Mapping[str, int],
        image_env: Mapping[str, str],
        on_end: Callable[[LocalSandbox, bool], Awaitable[Snapshot | None]],
    ) -> None:
        self.id, self.spec, self.facts = identity, spec, facts
        self._image_env = image_env
        self._life, self._control, self._owners, self._on_end = life, control, owners, on_end
        self._kills = 0
        self._reason: str | None = None
        self._end: asyncio.Task[Snapshot | None] | None = None
        self._gone = asyncio.Event()
        self._processes: set[LocalProcess] = set()
        asyncio.get_running_loop().add_reader(life.fileno(), self._on_life)

    async def __aenter__(self) -> LocalSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    @property
    def kills(self) -> int:
        """How often all processes were killed."""
        return self._kills

    def lost(self) -> str | None:
        """Why the sandbox is gone, None while it lives."""
        if self._reason is None and not self._gone.is_set() and _has_news(self._life, select.POLLIN):
            self._on_life()
        if self._reason is not None:
            return self._reason
        if self._end is not None:
            return "it was killed"
        return "its init died" if _has_news(self._control, select.POLLHUP) else None

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
        process = self._start(command, user, cwd, env, stdin)
        try:
            result = await process.wait(timeout)
            process.release()
            return result
        finally:
            process.abandon()

    async def spawn(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> LocalProcess:
        """See `Sandbox.spawn`."""
        return self._start(command, user, cwd, env, stdin)

    async def terminal(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[LocalProcess, int]:
        """See `Terminals.terminal`."""
        body = self._command(command, user, cwd, env) | {"terminal": True}
        _, (master, slave) = await self._call(b"t", {"user": user})
        try:
            return self._launch(body, [slave, slave, slave]), master
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)

    def _start(
        self,
        command: Sequence[str] | str,
        user: str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        stdin: bytes,
    ) -> LocalProcess:
        body = self._command(command, user, cwd, env)
        out, out_write = os.pipe2(os.O_CLOEXEC)
        err, err_write = os.pipe2(os.O_CLOEXEC)
        theirs = [out_write, err_write]
        try:
            if user in self._owners:  # programs open /dev/stderr by name, which asks for the pipe's owner
                for fd in theirs:
                    os.fchown(fd, self._owners[user], -1)
            if stdin:
                theirs.append(wire.memory_file(stdin, name="stdin"))
            return self._launch(body, theirs, (out, err))
        except BaseException:
            aio.close_all((out, err))
            raise
        finally:
            aio.close_all(theirs)

    def _command(
        self, command: Sequence[str] | str, user: str, cwd: str | None, env: Mapping[str, str] | None
    ) -> dict[str, Any]:
        environment = {"PATH": _PATH, "HOME": home_of(user), "USER": user, "LANG": "C.UTF-8"}
        environment |= {**self._image_env, **self.spec.env, **(env or {})}
        cwd = cwd or self.spec.workdir
        return {"argv": argv_of(command, cwd, environment), "user": user, "cwd": cwd, "env": environment}

    def _launch(self, body: dict[str, Any], theirs: Sequence[int], ours: tuple[int, int] | None = None) -> LocalProcess:
        """Have init run a command; `ours` are the pipes that its output comes from, if it does."""
        channel = self._request(b"x", body, theirs)
        process = LocalProcess(self, channel, ours, self.spec.limits.output)
        self._processes.add(process)
        return process

    def forget(self, process: LocalProcess) -> None:
        """Told when nothing is left of a process."""
        self._processes.discard(process)

    async def kill_processes(self) -> None:
        """See `Sandbox.kill_processes`."""
        self._kills += 1
        await self._call(b"k", {})

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See `Sandbox.read_file`."""
        answer, fds = await self._call(b"r", self._at(path, "root"))
        try:
            if answer["size"] > max_bytes:
                raise SandboxError(f"{path} is larger than {max_bytes} bytes", retryable=False)
            if answer["size"] <= _INLINE_READ:
                data = _read(fds[0], max_bytes)
            else:
                data = await asyncio.to_thread(_read, os.dup(fds[0]), max_bytes, close=True)
        finally:
            aio.close_all(fds)
        if len(data) > max_bytes:
            raise SandboxError(f"{path} is larger than {max_bytes} bytes", retryable=False)
        return data

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644, user: str = AGENT_USER) -> None:
        """See `Sandbox.write_file`."""
        body = self._at(path, user) | {"mode": mode}
        await self._call_with_data(b"w", body, data)

    async def upload_tar(self, path: str, data: bytes | Path, *, user: str = AGENT_USER) -> None:
        """See `Sandbox.upload_tar`. A file goes through a pipe: its descriptor is none of the sandbox's business."""
        body = self._at(path, user)
        if isinstance(data, bytes):
            await self._call_with_data(b"u", body, data)
            return
        source = data.open("rb")
        read, write = os.pipe2(os.O_CLOEXEC)
        feeding = asyncio.get_running_loop().run_in_executor(None, _feed, source, write)
        try:
            await self._call(b"u", body, [read])
        finally:
            os.close(read)  # and so the feeding ends
        await feeding

    async def download_tar(
        self, path: str, *, exclude_names: Sequence[str] = (), max_bytes: int = 2 << 30
    ) -> AsyncIterator[bytes]:
        """See `Sandbox.download_tar`. Layers and other mounts below `path` are left out."""
        body = self._at(path, "root") | {"exclude_names": list(exclude_names), "max_bytes": max_bytes}
        pipe, pipe_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(pipe_write, True)
        channel: socket.socket | None = None
        try:
            try:
                channel = self._request(b"d", body, [pipe_write])
            finally:
                os.close(pipe_write)
            while True:
                async with asyncio.timeout(_FILE_SECONDS):
                    await aio.readable(pipe)
                if not (chunk := os.read(pipe, 1 << 18)):
                    break
                yield chunk
            answer, _ = await aio.packet(channel, _FILE_SECONDS)
            self._checked(answer, body)
        except TimeoutError as error:
            raise SandboxError(f"reading {path} made no progress for {_FILE_SECONDS:g} s") from error
        finally:
            os.close(pipe)
            if channel is not None:
                channel.close()

    def listen(self, port: int) -> socket.socket:
        """See `Sandbox.listen`."""
        if self.spec.network != "gateway":
            raise SandboxError('this sandbox has no network; create it with network="gateway"', retryable=False)
        channel = self._request(b"l", {"port": port})
        try:
            channel.settimeout(10)
            answer, fds = wire.receive_packet(channel)
        except TimeoutError as error:
            raise SandboxError("the sandbox did not open a port within 10 s") from error
        finally:
            channel.close()
        self._checked(answer, {})
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(False)
        return listener

    async def snapshot(self) -> Snapshot:
        """See `Sandbox.snapshot`."""
        if (reason := self.lost()) is not None:
            raise SandboxLostError(f"the sandbox is gone: {reason}")
        self._end = asyncio.ensure_future(self._finish(keep_files=True))
        snapshot = await asyncio.shield(self._end)
        if snapshot is None:
            raise SandboxLostError("the sandbox died before its files could be frozen")
        return snapshot

    async def kill(self) -> None:
        """See `Sandbox.kill`."""
        if self._end is None:
            self._end = asyncio.ensure_future(self._finish(keep_files=False))
        await asyncio.shield(self._end)

    async def _finish(self, *, keep_files: bool) -> Snapshot | None:
        alive = not self._gone.is_set()
        with suppress(OSError):
            self._life.send(b"s" if keep_files else b"k")
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._gone.wait()
        except TimeoutError as error:
            raise SandboxError(f"sandbox {self.id} did not die within {_END_SECONDS:g} s") from error
        for process in list(self._processes):
            process.sandbox_ended()
        self._control.close()
        return await self._on_end(self, keep_files and alive)

    def _on_life(self) -> None:
        try:
            message, _ = wire.receive_packet(self._life)
        except BlockingIOError:
            return
        if message is None:
            if self._reason is None and self._end is None:
                self._reason = "its keeper died"
            asyncio.get_running_loop().remove_reader(self._life.fileno())
            self._life.close()
            self._gone.set()
        elif self._end is None:
            self._reason = str(message.get("dead") or message.get("error"))

    def _at(self, path: str, user: str) -> dict[str, Any]:
        """What a request says of a path, and of the user that acts on it."""
        home_of(user)
        return {"user": user, "path": os.path.join(self.spec.workdir, path)}

    def _request(self, op: bytes, body: dict[str, Any], fds: Sequence[int] = ()) -> socket.socket:
        if (reason := self.lost()) is not None:
            raise SandboxLostError(f"the sandbox is gone: {reason}")
        try:
            return aio.request(self._control, op, body, fds)
        except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            raise SandboxLostError(f"the sandbox is gone: {self.lost() or error}") from error

    async def _call(self, op: bytes, body: dict[str, Any], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        channel = self._request(op, body, fds)
        try:
            answer, received = await aio.packet(channel, _FILE_SECONDS)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not answer within {_FILE_SECONDS:g} s") from error
        finally:
            channel.close()
        return self._checked(answer, body), received

    async def _call_with_data(self, op: bytes, body: dict[str, Any], data: bytes) -> None:
        fd = wire.memory_file(data)
        try:
            await self._call(op, body, [fd])
        finally:
            os.close(fd)

    def _checked(self, answer: dict[str, Any] | None, body: Mapping[str, Any]) -> dict[str, Any]:
        if answer is None:
            if (reason := self.lost()) is not None:
                raise SandboxLostError(f"the sandbox died during a call: {reason}")
            raise SandboxError("a call was killed inside the sandbox before it answered")
        if "error" in answer:
            _raise(answer, str(body.get("path", "")))
        return answer


def _feed(source: IO[bytes], pipe: int) -> None:
    """Write a file into a pipe until its reader is gone, and close both."""
    with suppress(BrokenPipeError), source, open(pipe, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def _has_news(sock: socket.socket, event: int) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(0))


def _raise(answer: Mapping[str, Any], path: str) -> NoReturn:
    if answer.get("errno") in (errno.ENOENT, errno.ENOTDIR) and path:
        raise FileNotFoundError(answer["errno"], f"{answer['error']} in the sandbox", path)
    where = "" if not path or path in answer["error"] else f"{path}: "
    raise SandboxError(f"{where}{answer['error']}", retryable=False)


def _read(fd: int, max_bytes: int, *, close: bool = False) -> bytes:
    """The content, one byte more than allowed at most: sizes lie, bytes do not."""
    try:
        parts = bytearray()
        while len(parts) <= max_bytes and (chunk := os.read(fd, min(1 << 20, max_bytes + 1 - len(parts)))):
            parts += chunk
        return bytes(parts)
    finally:
        if close:
            os.close(fd)
