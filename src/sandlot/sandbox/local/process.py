"""A command running in a local sandbox: its output drained as it comes, its end, and the death of its whole tree."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.base import ExecResult
from sandlot.sandbox.jail import wire

_CHUNK = 1 << 16
_LEFTOVER_SECONDS = 0.2
_KILL_SECONDS = 8.0


class Owner(Protocol):
    """What a process needs of its sandbox."""

    @property
    def kills(self) -> int:
        """How often all processes were killed."""
        ...

    def lost(self) -> str | None:
        """Why the sandbox is gone, None while it lives."""
        ...

    async def kill_processes(self) -> None: ...

    def forget(self, process: LocalProcess) -> None:
        """Told when nothing is left of a process."""
        ...


class _Drain:
    """Reads a pipe to its end without ever holding more than the limit; no pipe (-1) is an ended one."""

    def __init__(self, fd: int, limit: int, on_end: Callable[[], None]) -> None:
        self.data = bytearray()
        self.truncated = False
        self.ended = fd < 0
        self._fd, self._limit, self._on_end = fd, limit, on_end
        if self.ended:
            return
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Read once; whether there may be more right now."""
        try:
            chunk = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        self.truncated |= len(chunk) > room
        if not chunk:
            self.close()
            self._on_end()
        return bool(chunk)

    def finish(self) -> None:
        """Take what is there now, and stop."""
        for _ in range(64):
            if self.ended or not self._read():
                break
        self.close()

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._fd)
            os.close(self._fd)


class LocalProcess:
    """See `Process`. A command has ended when its main process has; daemons that it left may live on until `kill`."""

    def __init__(self, owner: Owner, channel: socket.socket, streams: tuple[int, int] | None, limit: int) -> None:
        self._owner, self._channel = owner, channel
        self._kills_at_start = owner.kills
        self._started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[ExecResult] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._status: dict[str, Any] | None = None
        self._timed_out = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._out, self._err = (_Drain(fd, limit, self._on_output_end) for fd in streams or (-1, -1))
        self._loop.add_reader(channel.fileno(), self._on_channel)

    @property
    def running(self) -> bool:
        """Whether the main process runs."""
        return self._status is None and not self._result.done()

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """See `Process.wait`."""
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._result)
        except TimeoutError:
            if self._status is None:
                self._timed_out = True
            await self.kill()
            return await asyncio.shield(self._result)

    async def kill(self) -> None:
        """See `Process.kill`."""
        if not self._closed.is_set():
            with suppress(OSError):
                self._channel.send(b"k")
            try:
                async with asyncio.timeout(_KILL_SECONDS):
                    await self._closed.wait()
            except TimeoutError:
                await self._owner.kill_processes()
                self._close_channel()
        for task in list(self._tasks):
            await asyncio.shield(task)
        if not self._result.done():
            self._finish()

    def release(self) -> None:
        """Let go of what the command left running: it lives on as daemons of the sandbox."""
        if not self._closed.is_set():
            with suppress(OSError):
                self._channel.send(b"r")
            self._close_channel()

    def abandon(self) -> None:
        """Close everything at once; the end of the channel makes the supervisor kill the tree."""
        self._close_channel()
        self._out.close()
        self._err.close()
        if not self._result.done():
            self._result.cancel()

    def sandbox_ended(self) -> None:
        """The sandbox is dead, and with it whatever ran."""
        self._close_channel()
        if self._status is not None:
            self._finish()
        else:
            self._on_supervisor_end()

    def _on_channel(self) -> None:
        try:
            message, _ = wire.receive_packet(self._channel)
        except BlockingIOError:
            return
        if message is None:
            self._close_channel()
            self._on_supervisor_end()
        elif "error" in message:
            self._fail(SandboxError(f"the command could not be started: {message['error']}", retryable=False))
        elif "escaped" in message:
            self._in_background(self._kill_everything())
        else:
            self._status = message
            if self._out.ended and self._err.ended:
                self._finish()
            else:
                self._loop.call_later(_LEFTOVER_SECONDS, self._finish)

    def _on_supervisor_end(self) -> None:
        if self._result.done() or self._status is not None:
            return
        if (reason := self._owner.lost()) is not None:
            self._fail(SandboxLostError(f"the sandbox died while a command ran: {reason}"))
        elif self._owner.kills != self._kills_at_start:
            self._finish()
        else:
            # Something inside killed the supervisor, so its tree can no longer be told from others.
            self._in_background(self._kill_everything())

    async def _kill_everything(self) -> None:
        try:
            await self._owner.kill_processes()
        except SandboxError as error:
            self._fail(error)
        else:
            self._finish()

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_output_end(self) -> None:
        if self._status is not None and self._out.ended and self._err.ended:
            self._finish()

    def _close_channel(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
            self._owner.forget(self)

    def _fail(self, error: Exception) -> None:
        self._out.close()
        self._err.close()
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # seen: nobody may be waiting

    def _finish(self) -> None:
        if self._result.done():
            return
        self._out.finish()
        self._err.finish()
        status = self._status or {"exit": None, "oom": False}
        code: int | None = status["exit"]
        out_of_memory = bool(status["oom"]) and code != 0
        killed = code is None or code < 0 or (out_of_memory and code == 137) or self._timed_out
        result = ExecResult(
            exit_code=None if killed else code,
            stdout=bytes(self._out.data),
            stderr=bytes(self._err.data),
            timed_out=self._timed_out,
            truncated=self._out.truncated or self._err.truncated,
            out_of_memory=out_of_memory and not self._timed_out,
            duration=time.monotonic() - self._started,
        )
        self._result.set_result(result)
