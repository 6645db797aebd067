"""A command in a sandbox of the local backend with its three streams open, as clouds run them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from sandlot.sandbox.local.process import LocalProcess
from sandlot.sandbox.local.sandbox import LocalSandbox


class Piped:
    """Started as root when it is made; `seconds` it may take, None for any time. Its output is kept."""

    def __init__(self, sandbox: LocalSandbox, argv: Sequence[str], seconds: float | None = None) -> None:
        self._sandbox, self._argv, self._seconds = sandbox, list(argv), seconds
        self._kept = {1: bytearray(), 2: bytearray()}
        self._news = asyncio.Event()
        self._killed = False
        stdin, self._stdin = os.pipe2(os.O_CLOEXEC)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in self._kept]
        self._open = {kind: ours for kind, (ours, _) in zip(self._kept, pipes, strict=True)}
        self._process = self._launch(theirs := [*(write for _, write in pipes), stdin])
        for kind, fd in self._open.items():
            os.set_blocking(fd, False)
            asyncio.get_running_loop().add_reader(fd, self._take, kind, fd)
        self.ended = asyncio.create_task(self._end(theirs))
        """Its exit code, None when a signal or its time ended it."""
        self.ended.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be waiting

    def _launch(self, theirs: Sequence[int]) -> LocalProcess:
        return self._sandbox._launch(self._sandbox._command(self._argv, "root", "/", None), theirs)

    def _take(self, kind: int, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        self._kept[kind] += data
        if not data:
            self._shut(kind)
        self._news.set()

    def _shut(self, kind: int) -> None:
        if (fd := self._open.pop(kind, None)) is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    async def _end(self, theirs: Sequence[int]) -> int | None:
        try:
            result = await self._process.wait(self._seconds)
            if result.exit_code is None and not (result.timed_out or self._killed or any(self._kept.values())):
                # Whoever kills all inside kills what waits there for the local backend's next command, too.
                self._process = self._launch(theirs)
                result = await self._process.wait(self._seconds)
            return result.exit_code
        finally:
            for fd in theirs:
                os.close(fd)

    async def output(self, kind: int, start: int = 0) -> AsyncIterator[bytes]:
        """What it says on stdout (1) or stderr (2), from a byte on, until that is closed."""
        kept = self._kept[kind]
        while kind in self._open or len(kept) > start:
            if len(kept) > start:
                data = bytes(kept[start : start + (1 << 20)])
                start += len(data)
                yield data
            else:
                self._news.clear()
                await self._news.wait()

    async def send(self, data: bytes) -> None:
        """Write to its stdin, as fast as it reads."""
        while data:
            data = data[await asyncio.to_thread(os.write, self._stdin, data) :]

    def send_end(self) -> None:
        """Close its stdin."""
        fd, self._stdin = self._stdin, -1
        if fd >= 0:
            os.close(fd)

    async def kill(self) -> None:
        """End it with all that it started, and forget its output."""
        self._killed = True
        with suppress(Exception):
            await self._process.kill()
        with suppress(Exception):
            await self.ended
        self.send_end()
        for kind in list(self._open):
            self._shut(kind)
        self._news.set()
