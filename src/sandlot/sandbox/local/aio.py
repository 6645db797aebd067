"""Waiting for descriptors on the event loop, and requests to a sandbox's init."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any

from sandlot.sandbox.jail import wire


async def readable(fd: int) -> None:
    """Wait until `fd` has data or ended."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if future.done() else future.set_result(None))
    try:
        await future
    finally:
        loop.remove_reader(fd)


async def packet(channel: socket.socket, timeout: float | None) -> tuple[dict[str, Any] | None, list[int]]:
    """The next packet of a non-blocking channel, None at its end; `TimeoutError` when it does not come."""
    async with asyncio.timeout(timeout):
        while True:
            await readable(channel.fileno())
            try:
                return wire.receive_packet(channel)
            except BlockingIOError:
                continue


def request(control: socket.socket, op: bytes, body: dict[str, Any], fds: Sequence[int] = ()) -> socket.socket:
    """Send a request to init; the channel on which it is answered. `OSError` when init is gone."""
    ours, theirs = wire.packet_pair()
    try:
        wire.send_request(control, op, body, [theirs.fileno(), *fds])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return ours


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
