import pytest

from spanset import SpanSet


def test_order():
    assert list(SpanSet([(5, 6), (1, 2)])) == [(1, 2), (5, 6)]


def test_overlap_with_neighbours():
    assert list(SpanSet([(1, 4), (6, 9), (3, 7)])) == [(1, 9)]


def test_contains():
    s = SpanSet([(1, 3)])
    assert [n in s for n in range(5)] == [False, True, True, False, False]


def test_empty_span():
    assert len(SpanSet([(1, 1)])) == 0


def test_backwards():
    with pytest.raises(ValueError):
        SpanSet([(2, 1)])
