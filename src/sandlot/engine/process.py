"""An engine as a child process: started, waited for, and gone when its parent is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from sandlot.errors import EngineError

_STOP_S = 5.0
_TAIL_LINES = 6


def default_threads() -> int:
    """Half of the cores, so that agents and graders have the rest; with two cores that is one.

    More threads than free cores are far slower than one: BLAS threads spin while they wait for each other.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


class EngineProcess:
    """`async with EngineProcess(model_dir) as engine: VllmEngine(engine.url)`.

    It runs in a process group of its own and ends when this process does, however it ends. What it prints goes to
    `log_file`, by default a file without a name.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        kind: str = "embedded",
        script: Path | None = None,
        threads: int | None = None,
        max_context: int | None = None,
        max_running: int | None = None,
        cache_mb: int | None = None,
        delay_s: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        log_file: Path | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        self.url = ""
        self.kind = kind
        options = {
            "--model": model_dir,
            "--kind": kind,
            "--script": script,
            "--threads": threads or default_threads(),
            "--max-context": max_context,
            "--max-running": max_running,
            "--cache-mb": cache_mb,
            "--delay": delay_s,
            "--host": host,
            "--port": port,
        }
        self._argv = [sys.executable, "-m", "sandlot.engine.serve", "--with-parent"]
        for name, value in options.items():
            if value is not None:
                self._argv += [name, str(value)]
        self._log_file = log_file
        self._log: IO[bytes] | None = None
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it and wait until it serves. `EngineError` with the end of its log if it does not."""
        if self._log_file is None:
            # Without a name: a killed process leaves none behind.
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 the process keeps it
        else:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._log_file.open("a+b")
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), self._start_timeout_s)
        except TimeoutError:
            tail = self._tail()
            await self.stop()
            raise EngineError(
                f"the {self.kind} engine was not ready in {self._start_timeout_s:.0f} s: {tail}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        ready, _, url = line.decode().strip().partition(" ")
        if ready != "READY":
            code = await self._process.wait()
            tail = self._tail()
            await self.stop()
            raise EngineError(f"the {self.kind} engine ended at its start (exit {code}): {tail}", retryable=False)
        self.url = url

    async def wait(self) -> None:
        """Wait until it ends, and say why as `EngineError`. Cancel it when the engine is not needed any more."""
        assert self._process is not None, "start it first"
        code = await self._process.wait()
        raise EngineError(f"the {self.kind} engine at {self.url} ended (exit {code}): {self._tail()}", retryable=False)

    async def stop(self) -> None:
        """End it and its whole group; gently first. May be called twice."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                pass
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _tail(self) -> str:
        """The last lines of its log on one line."""
        if self._log is None:
            return "its log is closed"
        text = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)  # its offset is the engine's, too
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return " | ".join(lines[-_TAIL_LINES:]) or "it printed nothing"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
