"""The gateway on its own: sessions opened and finished over the control side, kept in a run directory if asked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from sandlot.config import RunConfig
from sandlot.errors import ConfigError, JournalError
from sandlot.gateway import Gateway, GatewayLimits
from sandlot.gateway.control import control_app, control_routes
from sandlot.gateway.front import Front, listen
from sandlot.gateway.front_control import FrontControl
from sandlot.gateway.gateway import RecorderFactory
from sandlot.gateway.process import loaded
from sandlot.gateway.workers import HEARTBEAT_TIMEOUT_S, Workers, worker_argv
from sandlot.rollout.continued import expect_same_model, open_run
from sandlot.rollout.policy import Say, policy_of, with_engine
from sandlot.rollout.recorder import JournalRecorder
from sandlot.trajectory.records import SessionRecord
from sandlot.trajectory.rundir import RunDir

Address = tuple[str, int]
Ready = Callable[[str, str], None]
"""Told the addresses of the agents' and of the control side once both are served."""


@dataclass(frozen=True)
class Places:
    """Where agents and the control side are served, and how agents are told to reach it when not by host and port."""

    agents: Address
    control: Address
    base_url: str = ""

    def told(self, port: int) -> str:
        """The address that agents get."""
        return self.base_url or _url(self.agents[0], port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _RunRecorder(JournalRecorder):
    """Completes the episode in its run directory when its session is finished."""

    def __init__(self, run: RunDir, header: SessionRecord) -> None:
        self._run = run
        self._episode_id = header.episode_id
        self._own = run.begin(header)
        super().__init__(self._own)

    def sealed(self, detail: Mapping[str, Any]) -> None:
        if not self._own.sealed:  # a try before may have failed after this
            super().sealed(detail)
        self._own.close()
        self._run.complete(self._episode_id)

    def close(self) -> None:
        self._own.close()


async def serve_gateway(
    config: RunConfig,
    *,
    admin_key: str,
    places: Places,
    out: Path | None,
    workers: int = 1,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S,
    ready: Ready,
    say: Say,
) -> None:
    """Serve until SIGINT or SIGTERM; sessions still open are sealed and stay unfinished in the run directory.

    Of several workers, one whose event loop stands still for `heartbeat_timeout` seconds is replaced.
    """
    stop = stop_signals()
    async with AsyncExitStack() as stack:
        run = None
        if out is not None:
            run = stack.enter_context(open_run(out, config))
            await asyncio.to_thread(_recover, run, say)
        try:
            if workers == 1:
                port, control = await _alone(stack, config, run, admin_key, places, say)
            else:
                port, control = await _with_workers(
                    stack, config, run, admin_key, places, say, workers, heartbeat_timeout
                )
        except OSError as error:
            where = " or ".join(_url(*address) for address in (places.agents, places.control))
            raise ConfigError(f"{where} cannot be served ({error.strerror}): choose others") from error
        loaded()
        ready(places.told(port), _url(places.control[0], control))
        await stop.wait()


async def _alone(
    stack: AsyncExitStack, config: RunConfig, run: RunDir | None, admin_key: str, places: Places, say: Say
) -> tuple[int, int]:
    """Serve from this process; the ports."""
    policy = await stack.enter_async_context(policy_of(config, (), say=say))
    if run is not None:
        expect_same_model(run, policy.model)
    gateway = await stack.enter_async_context(Gateway(policy, recorder=recorders(run) if run is not None else None))
    port = await gateway.serve(*places.agents)
    app = control_app(gateway, admin_key, places.told(port))
    return port, await gateway.serve_app(app, *places.control)


async def _with_workers(
    stack: AsyncExitStack,
    config: RunConfig,
    run: RunDir | None,
    admin_key: str,
    places: Places,
    say: Say,
    count: int,
    heartbeat_timeout: float,
) -> tuple[int, int]:
    """Serve from several processes; the ports, which are this one's."""
    config = await stack.enter_async_context(with_engine(config, (), say=say))
    sockets = [stack.enter_context(sock) for sock in await listen(*places.agents)]
    port = int(sockets[0].getsockname()[1])
    setup = {
        "config": config.model_dump(mode="json"),
        "base_url": places.told(port),
        "run": None if run is None else str(run.path),
        "lock": None if run is None else run.lock,
    }
    inherited = [run.lock] if run is not None and run.lock is not None else []
    workers = Workers(
        count,
        worker_argv("sandlot.rollout.gateway_worker"),
        setup,
        admin_key=admin_key,
        inherited=inherited,
        heartbeat_timeout=heartbeat_timeout,
    )
    control = FrontControl(workers, GatewayLimits().sessions)
    say(f"starting {count} gateway workers")
    await stack.enter_async_context(workers)
    await stack.enter_async_context(Front(workers, sockets))
    runner = web.AppRunner(control_routes(control, admin_key), handler_cancellation=True, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, *places.control, shutdown_timeout=2.0).start()
    return port, int(runner.addresses[0][1])


def _recover(run: RunDir, say: Say) -> None:
    """Complete what was finished when an earlier gateway was killed; damage there keeps nobody from new sessions."""
    try:
        run.recover()
    except JournalError as error:
        say(str(error))


def stop_signals() -> asyncio.Event:
    """Set when this process is asked to end."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def recorders(run: RunDir) -> RecorderFactory:
    """Keeps sessions as episodes of a run."""

    def recorder(session_id: str, header: Mapping[str, Any]) -> _RunRecorder:
        record = SessionRecord(
            episode_id=session_id,
            group_id=str(header["metadata"].get("group_id") or session_id),
            sampling=dict(header["sampling"]),
            metadata=dict(header["metadata"]),
            session={"model": header["model"], "max_context": header["max_context"]},
        )
        return _RunRecorder(run, record)

    return recorder
