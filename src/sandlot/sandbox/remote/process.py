"""A command in a remote sandbox: its output drained as it comes, its end, and the death of its whole tree."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import IO, Any, Protocol

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.base import ExecResult

_LEFTOVER_SECONDS = 0.2
_POLL_SECONDS = (0.1, 2.0)
_SIGNALS = range(129, 129 + 31)


class Stream(Protocol):
    """One command as an API gives it: output in pieces, an exit code, and no promise about its children."""

    async def read(self) -> tuple[int, bytes] | None:
        """(1 for stdout or 2 for stderr, data), None when the output has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Send to the command's stdin."""
        ...

    async def exit_code(self) -> int | None:
        """The exit code, with 128 + the number of a signal; None while the command runs."""
        ...

    def skip(self, kind: int) -> None:
        """Nothing more of this output (1 or 2) is wanted; it need not be read."""
        ...

    async def close(self) -> None: ...


class HandedStream:
    """See `Stream`: for SDKs that hand pieces of output to callbacks, `out` and `err`, and end when `run` does."""

    def __init__(
        self,
        run: Callable[[HandedStream], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[Any]],
        close: Callable[[], Awaitable[Any]],
    ) -> None:
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(64)
        self._write, self._close = write, close
        self._task = asyncio.create_task(self._run(run))

    async def _run(self, run: Callable[[HandedStream], Awaitable[Any]]) -> None:
        try:
            await run(self)
        except Exception as error:  # an SDK's own, which for some is any exit code but 0
            await self.err(str(error))
        await self._pieces.put(None)

    async def out(self, data: bytes | str) -> None:
        """Take a piece of stdout."""
        await self._pieces.put((1, data.encode() if isinstance(data, str) else data))

    async def err(self, data: bytes | str) -> None:
        """Take a piece of stderr."""
        await self._pieces.put((2, data.encode() if isinstance(data, str) else data))

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        return await self._pieces.get()

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        try:
            await self._write(data)
        except Exception as error:  # an SDK's own
            raise SandboxError(f"a command's stdin broke: {error}") from error

    def skip(self, kind: int) -> None:
        """See `Stream.skip`. It comes all the same."""

    async def exit_code(self) -> int | None:
        """Not told: such a stream runs as long as its sandbox."""
        return None

    async def close(self) -> None:
        """See `Stream.close`."""
        self._task.cancel()
        try:
            await self._close()
        except Exception as error:  # an SDK's own
            raise SandboxError(f"a command could not be ended: {error}") from error


class Owner(Protocol):
    """What a process needs of its sandbox."""

    async def kill_marked(self, mark: str, seconds: float, user: str) -> None:
        """Kill the tree of the command with a mark, which started `seconds` ago."""
        ...

    def lost(self) -> str | None:
        """Why the sandbox is gone, None while it lives, as far as we know."""
        ...

    async def why_lost(self) -> str | None:
        """The same, after a look."""
        ...

    async def out_of_memory(self, code: int) -> bool:
        """Whether somebody was killed for memory since the last time this was asked."""
        ...


class RemoteProcess:
    """See `Process`. It has ended when its main process has; daemons that it left may live on until `kill`."""

    def __init__(self, owner: Owner, mark: str, user: str, limit: int, sink: IO[bytes] | None = None) -> None:
        """`sink` gets stdout instead of the result."""
        self._owner, self._mark, self._user, self._limit = owner, mark, user, limit
        self._started = time.monotonic()
        self._data: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        self._sink, self._taken = sink, {1: 0, 2: 0}
        self._truncated = False
        self._timed_out = False
        self._killed = False
        self._task: asyncio.Task[ExecResult] | None = None

    def follow(self, stream: Stream, stdin: bytes) -> None:
        """Begin to read; called once."""
        self._task = asyncio.create_task(self._follow(stream, stdin))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be waiting

    @property
    def running(self) -> bool:
        """Whether the main process runs."""
        return self._task is not None and not self._task.done()

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """See `Process.wait`."""
        assert self._task is not None
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._task)
        except TimeoutError:
            self._timed_out = not self._task.done()
            await self.kill()
            return await asyncio.shield(self._task)

    async def kill(self) -> None:
        """See `Process.kill`."""
        if self._owner.lost() is None:
            self._killed = True
            await self._owner.kill_marked(self._mark, time.monotonic() - self._started, self._user)
        if self._task is not None and not self._task.done():
            with suppress(TimeoutError, SandboxError):
                async with asyncio.timeout(10):
                    await asyncio.shield(self._task)

    async def _follow(self, stream: Stream, stdin: bytes) -> ExecResult:
        writing = asyncio.create_task(self._write(stream, stdin))
        reading = asyncio.create_task(self._drain(stream))
        try:
            pause = _POLL_SECONDS[0]
            code: int | None = None
            while not reading.done():
                await asyncio.wait({reading}, timeout=pause)
                pause = min(_POLL_SECONDS[1], pause * 1.5)
                # Its output may outlive a command: daemons hold the other end.
                if not reading.done() and (code := await stream.exit_code()) is not None:
                    await asyncio.wait({reading}, timeout=_LEFTOVER_SECONDS)
                    break
            if reading.done():
                reading.result()
            for _ in range(100):
                if code is not None or (code := await stream.exit_code()) is not None:
                    break
                await asyncio.sleep(0.05)
            else:
                raise SandboxError("the command's output ended, but not the command")
        except (OSError, ValueError, SandboxError) as error:
            if (reason := await self._owner.why_lost()) is not None:
                raise SandboxLostError(f"the sandbox died while a command ran: {reason}") from error
            if isinstance(error, SandboxError):
                raise
            raise SandboxError(f"the connection to a running command broke: {error}") from error
        finally:
            for task in (reading, writing):
                task.cancel()
            with suppress(OSError, SandboxError):
                await stream.close()
        return await self._result(code)

    async def _result(self, code: int) -> ExecResult:
        out, err = bytes(self._data[1]), bytes(self._data[2])
        if (reason := self._owner.lost()) is not None:
            raise SandboxLostError(f"the sandbox died while a command ran: {reason}")
        if code == 126 and err.startswith(f"{self._mark}: ".encode()):
            raise SandboxError(err.decode("utf-8", "replace").partition(": ")[2].strip(), retryable=False)
        out_of_memory = code != 0 and not self._timed_out and await self._owner.out_of_memory(code)
        return ExecResult(
            exit_code=None if self._timed_out or code in _SIGNALS else code,
            stdout=out,
            stderr=err,
            timed_out=self._timed_out,
            truncated=self._truncated,
            out_of_memory=out_of_memory,
            duration=time.monotonic() - self._started,
        )

    async def _write(self, stream: Stream, stdin: bytes) -> None:
        with suppress(OSError, RuntimeError):  # a command need not read all of it
            for start in range(0, len(stdin), 1 << 16):
                await stream.write(stdin[start : start + (1 << 16)])

    async def _drain(self, stream: Stream) -> None:
        while (message := await stream.read()) is not None:
            kind, data = message
            room = self._limit - self._taken[kind]
            if len(data) > room:
                self._truncated = True
                stream.skip(kind)
            self._taken[kind] += len(data[:room])
            if kind == 1 and self._sink is not None:
                await asyncio.to_thread(self._sink.write, data[:room])
            else:
                self._data[kind] += data[:room]


def new_mark() -> str:
    """A mark nobody can guess."""
    return secrets.token_hex(12)
