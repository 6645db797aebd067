"""Where a session's writes block: in threads, or on the event loop while nobody else needs it."""

from __future__ import annotations

import threading

import pytest

from sandlot.gateway import ledger
from sandlot.gateway.ledger import Writers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the writers' clock shows, as a list of one."""
    now = [0.0]
    monkeypatch.setattr(ledger.time, "perf_counter", lambda: now[0])
    return now


async def test_quick_writes_stay_on_the_loop_while_nobody_else_is_served(clock: list[float]) -> None:
    alone, here = [True], threading.get_ident()
    writers = Writers(lambda: alone[0])

    def write(seconds: float) -> bool:
        clock[0] += seconds
        return threading.get_ident() == here

    try:
        assert not await writers.run(write, 0.001), "how quick the disk is, is not known yet"
        assert await writers.run(write, 0.001)
        alone[0] = False
        assert not await writers.run(write, 0.001)
        alone[0] = True
        assert await writers.run(write, 0.1)
        assert not await writers.run(write, 0.001), "the disk was slow"
        assert await writers.run(write, 0.001), "and is not any more"
    finally:
        writers.close()


async def test_a_failed_write_is_told_wherever_it_was(clock: list[float]) -> None:
    writers = Writers(lambda: True)

    def fail() -> None:
        raise OSError("the disk is full")

    try:
        for _ in range(2):  # in a thread, then on the loop
            with pytest.raises(OSError, match="the disk is full"):
                await writers.run(fail)
    finally:
        writers.close()
