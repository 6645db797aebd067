import pytest

from dripgate import Bucket, Gate


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def emptied(rate, burst):
    clock = Clock()
    b = Bucket(rate, burst, clock=clock)
    assert b.allow(burst)
    return b, clock


def test_impatient_client_is_served_at_the_rate():
    b, clock = emptied(2, 5)
    served = 0
    for step in range(1, 601):
        clock.now = step * 0.125
        served += b.allow()
    assert served == 150


def test_looking_does_not_stop_the_filling():
    b, clock = emptied(1, 4)
    for step in range(1, 9):
        clock.now = step * 0.25
        assert b.tokens == step // 4
        assert not b.full


def test_slow_rate_in_small_steps():
    b, clock = emptied(0.5, 1)
    answers = []
    for step in range(1, 9):
        clock.now = step * 0.5
        answers.append(b.allow())
    assert answers == [False, False, False, True, False, False, False, True]


def test_retry_after_counts_down():
    b, clock = emptied(2, 5)
    assert b.retry_after() == pytest.approx(0.5)
    clock.now = 0.375
    assert b.retry_after() == pytest.approx(0.125)
    clock.now = 0.5
    assert b.retry_after() == 0
    assert b.allow()


def test_never_above_burst():
    b, clock = emptied(3, 2)
    clock.now = 1000.5
    assert b.tokens == 2
    assert b.full
    assert [b.allow() for _ in range(3)] == [True, True, False]


def test_clock_that_jumps_back_takes_nothing():
    b = None
    clock = Clock()
    clock.now = 50.0
    b = Bucket(rate=1, burst=5, clock=clock)
    assert b.allow(2)
    clock.now = 10.0
    assert b.tokens == 3


def test_clock_that_jumps_back_gives_nothing_twice():
    b, clock = emptied(1, 5)
    clock.now = 3.0
    assert b.tokens == 3
    clock.now = 1.0
    assert b.tokens == 3
    clock.now = 3.0
    assert b.tokens == 3
    clock.now = 4.0
    assert b.tokens == 4


def test_gate_serves_an_impatient_client():
    clock = Clock()
    gate = Gate(rate=1, burst=1, clock=clock)
    served = 0
    for step in range(41):
        clock.now = step * 0.25
        served += gate.allow("a")
    assert served == 11
