"""The worker processes of a gateway as their parent has them: started, given connections, replaced when they end.

Each has a number for good; a process that ends takes its sessions with it, and another one starts under its number.
A worker ends when its parent does: the parent holds the other end of its channel. Over the same channel the worker's
event loop gives signs of life; one from which none comes is ended like any other, for all its agents wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sandlot.errors import SandlotError
from sandlot.gateway.relay import client_of

log = logging.getLogger(__name__)
_START_S = 300.0
_AGAIN_S = 0.05
_SLOWEST_RESTART_S = 30.0
HEARTBEAT_TIMEOUT_S = 60.0
BEATS = 10
"""Signs of life that a worker gives in the time after which it is taken for hung."""


class WorkerError(SandlotError):
    """A worker process could not be started; the text is its own reason."""


class Worker:
    """One number among the workers, and the process that has it now. `up` is set while that one serves."""

    def __init__(self, number: int, directory: Path, admin_key: str) -> None:
        self.number = number
        self.up = asyncio.Event()
        self.silent = False
        """Whether it has given no sign of life for a while: what it is asked now waits."""
        self.lost: list[str] = []
        """Digests of the keys of sessions that ended with earlier processes."""
        self.client = client_of(control_socket(directory, number), Authorization=f"Bearer {admin_key}")
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None

    async def start(self, argv: Sequence[str], setup: Mapping[str, Any], inherited: Sequence[int]) -> None:
        """Start a process and wait until it serves. `WorkerError` with its reason when it does not."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._channel = ours
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                str(self.number),  # for who looks at a list of processes
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(), *inherited),
                start_new_session=True,
            )
            channel = theirs.fileno()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        mine = {**setup, "number": self.number, "channel": channel, "lost": self.lost}
        with contextlib.suppress(ConnectionError):  # it has ended: its answer says so
            self._process.stdin.write(msgspec.json.encode(mine))
            self._process.stdin.close()
        try:
            answer = await asyncio.wait_for(self._process.stdout.readline(), _START_S)
        except TimeoutError:
            raise WorkerError(f"gateway worker {self.number} did not start within {_START_S:.0f} s") from None
        told = msgspec.json.decode(answer) if answer else {"error": f"a gateway worker ended ({await self.ended()})"}
        if error := told.get("error"):
            raise WorkerError(error)

    async def ended(self) -> str:
        """Wait for the end of the process, and say how it came."""
        assert self._process is not None
        code = await self._process.wait()
        return f"exit {code}" if code >= 0 else signal.Signals(-code).name

    async def failed(self, timeout: float) -> str:
        """Wait until the process ends, or kill it when it has given no sign of life for so long; say which it was."""
        ending = asyncio.create_task(self.ended())
        try:
            missed = 0  # in looks, not seconds: what stops this process as well is no silence
            while missed < BEATS:
                await asyncio.wait({ending}, timeout=timeout / BEATS)
                if ending.done():
                    return ending.result()
                missed = 0 if self._heard() else missed + 1
                self.silent = missed > 1
        finally:
            ending.cancel()
            self.silent = False
        self._kill()
        return f"its event loop stood still for {timeout:g} s"

    def _heard(self) -> bool:
        assert self._channel is not None
        try:
            return bool(self._channel.recv(4096))
        except OSError:  # nothing has come, or the process is gone
            return False

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def give(self, connection: socket.socket) -> None:
        """Hand a connection over. `OSError` when the process is gone, or has too many in its queue."""
        assert self._channel is not None
        socket.send_fds(self._channel, [b"."], [connection.fileno()])

    async def stop(self, grace: float) -> None:
        """End the process and all that it started; gently first."""
        self.up.clear()
        if (process := self._process) is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), grace)
            self._kill()
            await process.wait()
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None


class Workers:
    """A fixed number of workers, kept running. Use as an async context manager.

    `argv` starts one; it reads `setup`, its number and its channel as JSON from standard input and answers with one
    line of JSON: `{}` once it serves, or `{"error": …}`. `inherited` file descriptors stay open in it. One whose event
    loop stands still for `heartbeat_timeout` seconds counts as ended.
    """

    def __init__(
        self,
        count: int,
        argv: Sequence[str],
        setup: Mapping[str, Any],
        *,
        admin_key: str,
        inherited: Sequence[int] = (),
        grace: float = 40.0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._directory = _private_directory()
        self._argv = argv
        self._setup = {
            **setup,
            "directory": str(self._directory),
            "workers": count,
            "admin_key": admin_key,
            "beat": heartbeat_timeout / BEATS,
        }
        self._inherited = inherited
        self._grace = grace
        self._heartbeat_timeout = heartbeat_timeout
        self._keeping: list[asyncio.Task[None]] = []
        self._turn = itertools.count()
        self.all = [Worker(number, self._directory, admin_key) for number in range(count)]
        self.brief: Callable[[Worker], Awaitable[None]] = _nothing
        """Told of a worker that serves, before it is used."""
        self.bury: Callable[[Worker, str], None] = _nothing_either
        """Told of a worker whose process has ended, and how."""

    @property
    def up(self) -> list[Worker]:
        """Those that serve now."""
        return [worker for worker in self.all if worker.up.is_set()]

    async def give(self, connection: socket.socket, number: int | None) -> None:
        """Hand a connection to a worker, or to any; waits while that one is being started again."""
        while True:
            worker = self._one(number)
            await worker.up.wait()
            try:
                return worker.give(connection)
            except OSError:  # its queue is full, or it has just ended
                await asyncio.sleep(_AGAIN_S)

    def _one(self, number: int | None) -> Worker:
        if number is not None and number < len(self.all):
            return self.all[number]
        among = [worker for worker in self.up if not worker.silent] or self.up or self.all
        return among[next(self._turn) % len(among)]

    async def __aenter__(self) -> Workers:
        try:
            await asyncio.gather(*(self._start(worker) for worker in self.all))
        except BaseException:
            await self.close()
            raise
        self._keeping = [asyncio.create_task(self._keep(worker)) for worker in self.all]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all workers; they seal their sessions first."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(worker.stop(self._grace) for worker in self.all))
        await asyncio.gather(*(worker.client.close() for worker in self.all))
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _start(self, worker: Worker) -> None:
        await worker.start(self._argv, self._setup, self._inherited)
        watching = asyncio.create_task(worker.failed(self._heartbeat_timeout))
        try:
            await self.brief(worker)
        finally:
            watching.cancel()
        worker.up.set()

    async def _keep(self, worker: Worker) -> None:
        while True:
            how = await worker.failed(self._heartbeat_timeout)
            log.error("gateway worker %d ended (%s); its sessions are lost and another one starts", worker.number, how)
            worker.up.clear()
            self.bury(worker, how)
            delay = 0.0
            while not worker.up.is_set():
                await asyncio.sleep(delay)
                await worker.stop(0)
                try:
                    await self._start(worker)
                except (SandlotError, OSError) as error:
                    delay = min(2 * delay + 1, _SLOWEST_RESTART_S)
                    log.error("gateway worker %d does not start (again in %.0f s): %s", worker.number, delay, error)


def _private_directory() -> Path:
    """For sockets, whose paths may have some 100 bytes; the user's own place for temporary files may be too deep."""
    own = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="sandlot-gateway-", dir=own if len(os.fsencode(own)) <= 60 else "/tmp"))


async def _nothing(worker: Worker) -> None: ...


def _nothing_either(worker: Worker, how: str) -> None: ...


def agents_socket(directory: Path, number: int) -> Path:
    """Where a worker serves the requests that came to others."""
    return directory / f"agents-{number}.sock"


def control_socket(directory: Path, number: int) -> Path:
    """Where a worker serves its control side."""
    return directory / f"control-{number}.sock"


def worker_argv(module: str) -> list[str]:
    """The command that runs a module as a worker."""
    return [sys.executable, "-m", module]
