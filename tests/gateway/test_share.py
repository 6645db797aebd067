"""What a session's work costs is told, and has the next of it wait: on the event loop, in threads, between requests."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sandlot.gateway import share
from sandlot.gateway.share import Share
from support.rig import MakeRig, ask


class Clock:
    """A thread's time as work says that it takes it; what is slept is told."""

    def __init__(self) -> None:
        self.spent, self.now = 0.0, 1_000.0
        self.slept: list[float] = []

    def thread_time(self) -> float:
        return self.spent

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.slept.append(seconds)
            self.now += seconds
        await asyncio.sleep(0)

    def work(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.spent += seconds
            self.now += seconds

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(share, "time", clock)
    monkeypatch.setattr(share, "asyncio", SimpleNamespace(Lock=asyncio.Lock, sleep=clock.sleep))
    return clock


async def test_after_what_took_long_a_session_rests_as_long(clock: Clock) -> None:
    sizes: list[int] = []

    async def in_thread(work: Callable[..., Any], *args: Any, size: int) -> Any:
        sizes.append(size)
        return work(*args)

    mine = Share(in_thread)
    await mine.read(clock.work(0.1), size=1)
    await mine.run(clock.work(3.0))
    assert clock.slept == []
    await mine.run(clock.work(0.1))  # the prompt of what was read is not put off
    assert clock.slept == []
    await mine.read(clock.work(0.1), size=1)
    assert clock.slept == [pytest.approx(2.9)]
    assert sizes == [1, 0, sys.maxsize, sys.maxsize]
    clock.now += share._APART_S
    await mine.read(clock.work(0.1), size=1)
    assert sizes[-1] == 1

    def broken() -> None:
        clock.work(5.0)()
        raise ValueError

    with pytest.raises(ValueError):
        await mine.read(broken, size=1)
    await mine.read(clock.work(0.1), size=1)
    assert clock.slept[1:] == [pytest.approx(5.0)]


async def test_bodies_that_take_a_while_do_not_follow_one_another_at_once(clock: Clock) -> None:
    """However many have come, others have their turn after each."""
    mine, lock, order = Share(asyncio.to_thread), asyncio.Lock(), []

    async def read(number: int) -> None:
        async with lock:
            await mine.here(clock.work(0.005))
            order.append(f"read {number}")

    async def other() -> None:
        for number in range(3):
            order.append(f"other {number}")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(read(number))
        group.create_task(other())
    assert order.index("other 1") < order.index("read 1")
    assert mine.quick


async def test_after_a_body_that_took_long_the_next_is_not_read_on_the_event_loop(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    decode, here = rig.session.bodies.decode, []

    def watched(*args: Any) -> Any:
        here.append(threading.current_thread() is threading.main_thread())
        return decode(*args)

    monkeypatch.setattr(rig.session.bodies, "decode", watched)
    for moment in (-1.0, -1.0, 1e9, 1e9):
        monkeypatch.setattr(share, "_MOMENT_S", moment)
        assert (await rig.messages(ask("go")))[0] == 200
    assert here == [True, False, False, True]
