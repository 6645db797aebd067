import pytest

from dripgate import Bucket


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_burst_then_nothing():
    b = Bucket(rate=2, burst=5, clock=Clock())
    assert [b.allow() for _ in range(6)] == [True] * 5 + [False]


def test_fills_while_nobody_asks():
    clock = Clock()
    b = Bucket(rate=2, burst=5, clock=clock)
    assert b.allow(5)
    clock.now += 1.0
    assert b.tokens == 2
    clock.now += 60
    assert b.tokens == 5


def test_cost_above_burst():
    with pytest.raises(ValueError, match="can never be paid"):
        Bucket(rate=1, burst=2).allow(3)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_bad_limits(rate, burst):
    with pytest.raises(ValueError):
        Bucket(rate, burst)
