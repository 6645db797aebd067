import random

from spanset import SpanSet


def cut(spans, start, end):
    s = SpanSet(spans)
    s.remove(start, end)
    return list(s)


def test_cut_out_of_the_middle():
    assert cut([(9, 17)], 12, 13) == [(9, 12), (13, 17)]


def test_cut_over_several_spans():
    assert cut([(8, 11), (12, 15), (18, 22)], 10, 20) == [(8, 10), (20, 22)]


def test_cut_in_a_gap():
    assert cut([(1, 2), (4, 5)], 2, 4) == [(1, 2), (4, 5)]


def test_empty_cut():
    assert cut([(1, 5)], 3, 3) == [(1, 5)]


def test_touching_spans_become_one():
    assert list(SpanSet([(9, 12), (12, 14)])) == [(9, 14)]
    assert list(SpanSet([(12, 14), (9, 12)])) == [(9, 14)]
    assert list(SpanSet([(1, 2), (3, 4), (2, 3)])) == [(1, 4)]


def test_covering_span_swallows_all():
    assert list(SpanSet([(1, 2), (4, 5), (7, 8), (0, 10)])) == [(0, 10)]


def test_intersection_has_every_part():
    assert list(SpanSet([(0, 10)]) & SpanSet([(1, 2), (4, 6)])) == [(1, 2), (4, 6)]


def test_difference_has_every_part():
    assert list(SpanSet([(0, 10)]) - SpanSet([(1, 2), (4, 6)])) == [(0, 1), (2, 4), (6, 10)]


def test_operands_stay():
    a, b = SpanSet([(0, 10)]), SpanSet([(2, 3)])
    assert (a - b, a & b, a | b) == (SpanSet([(0, 2), (3, 10)]), b, a)
    assert (list(a), list(b)) == ([(0, 10)], [(2, 3)])


def test_like_a_set_of_points():
    rng = random.Random(11)
    for _ in range(200):
        s, points = SpanSet(), set()
        for _ in range(8):
            start = rng.randrange(20)
            end = start + rng.randrange(8)
            if rng.random() < 0.6:
                s.add(start, end)
                points |= set(range(start, end))
            else:
                s.remove(start, end)
                points -= set(range(start, end))
            assert {n for n in range(-1, 30) if n in s} == points
            spans = list(s)
            assert all(spans[i][1] < spans[i + 1][0] for i in range(len(spans) - 1))
            assert all(a < b for a, b in spans)
