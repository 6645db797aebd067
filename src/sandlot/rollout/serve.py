"""The gateway on its own: sessions opened and finished over the control side, kept in a run directory if asked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from sandlot.config import RunConfig
from sandlot.gateway import Gateway
from sandlot.gateway.control import control_app
from sandlot.gateway.gateway import RecorderFactory
from sandlot.rollout.policy import Say, policy_of
from sandlot.rollout.recorder import JournalRecorder
from sandlot.trajectory.records import SessionRecord
from sandlot.trajectory.rundir import RunDir

Ready = Callable[[int, int], None]
"""Told the ports of the agents' and of the control side once both are served."""


class _RunRecorder(JournalRecorder):
    """Completes the episode in its run directory when its session is finished."""

    def __init__(self, run: RunDir, header: SessionRecord) -> None:
        self._run = run
        self._episode_id = header.episode_id
        self._own = run.begin(header)
        super().__init__(self._own)

    def sealed(self, detail: Mapping[str, Any]) -> None:
        super().sealed(detail)
        self._own.close()
        self._run.complete(self._episode_id)


async def serve_gateway(
    config: RunConfig,
    *,
    admin_key: str,
    agents: tuple[str, int],
    control: tuple[str, int],
    base_url: str,
    out: Path | None,
    ready: Ready,
    say: Say,
) -> None:
    """Serve until SIGINT or SIGTERM; sessions still open are sealed and stay unfinished in the run directory."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        recorder: RecorderFactory | None = None
        if out is not None:
            run = stack.enter_context(RunDir.create_or_continue(out, config.model_dump(mode="json")))
            recorder = _recorders(run)
        policy = await stack.enter_async_context(policy_of(config, (), say=say))
        gateway = await stack.enter_async_context(Gateway(policy, recorder=recorder))
        agent_port = await gateway.serve(*agents)
        told = base_url or f"http://{agents[0]}:{agent_port}"
        control_port = await gateway.serve_app(control_app(gateway, admin_key, told), *control)
        ready(agent_port, control_port)
        await stop.wait()


def _recorders(run: RunDir) -> RecorderFactory:
    def recorder(session_id: str, header: Mapping[str, Any]) -> _RunRecorder:
        record = SessionRecord(
            episode_id=session_id,
            group_id=str(header["metadata"].get("group_id", "")),
            sampling=dict(header["sampling"]),
            metadata=dict(header["metadata"]),
            session={"model": header["model"], "max_context": header["max_context"]},
        )
        return _RunRecorder(run, record)

    return recorder
