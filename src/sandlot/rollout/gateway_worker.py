"""One process of `sandlot gateway --workers N`. Its parent starts it and tells it everything on standard input."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from sandlot.config import load_config
from sandlot.errors import SandlotError
from sandlot.gateway import Gateway, GatewayLimits
from sandlot.gateway.process import loaded, serve
from sandlot.gateway.worker import WorkerServer
from sandlot.rollout.continued import expect_same_model
from sandlot.rollout.policy import policy_of
from sandlot.rollout.serve import recorders, stop_signals
from sandlot.trajectory.rundir import RunDir


class Setup(msgspec.Struct, frozen=True):
    """What a worker is told. `channel` and `lock` are file descriptors, `lost` hex digests of keys, `beat` seconds."""

    config: dict[str, Any]
    base_url: str
    run: Path | None
    lock: int | None
    directory: Path
    workers: int
    admin_key: str
    beat: float
    number: int
    channel: int
    lost: list[str]


def main() -> int:
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=Setup, dec_hook=lambda kind, value: kind(value))
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not pass for the answer
    try:
        serve(_serve(setup, answer), setup.workers)
    except SandlotError as error:
        _tell(answer, {"error": str(error)})
        return 1
    return 0


def _tell(answer: int, told: dict[str, str]) -> None:
    os.write(answer, msgspec.json.encode(told) + b"\n")


async def _serve(setup: Setup, answer: int) -> None:
    stop = stop_signals()
    async with AsyncExitStack() as stack:
        channel = stack.enter_context(socket.socket(fileno=setup.channel))
        run = None
        if setup.run is not None and setup.lock is not None:
            run = stack.enter_context(RunDir.join(setup.run, setup.lock))
        policy = await stack.enter_async_context(policy_of(load_config(None, setup.config), (), say=_quiet))
        if run is not None:
            expect_same_model(run, policy.model)
        gateway = await stack.enter_async_context(
            Gateway(
                policy,
                limits=GatewayLimits().shared_by(setup.workers),
                recorder=None if run is None else recorders(run),
                worker=setup.number,
                lost=[bytes.fromhex(digest) for digest in setup.lost],
            )
        )
        server = WorkerServer(gateway, setup.number, setup.workers, setup.directory, channel, stop.set)
        await server.start(setup.admin_key, setup.base_url, setup.beat)
        stack.push_async_callback(server.close)
        loaded()
        _tell(answer, {})
        await stop.wait()
    if server.orphaned:
        shutil.rmtree(setup.directory, ignore_errors=True)


def _quiet(text: str) -> None: ...


if __name__ == "__main__":
    sys.exit(main())
