from spanset import SpanSet


def test_cut_an_end():
    s = SpanSet([(1, 5)])
    s.remove(4, 9)
    assert list(s) == [(1, 4)]


def test_cut_a_start():
    s = SpanSet([(1, 5)])
    s.remove(0, 2)
    assert list(s) == [(2, 5)]


def test_remove_all():
    s = SpanSet([(1, 5)])
    s.remove(1, 5)
    assert list(s) == []


def test_remove_nothing():
    s = SpanSet([(1, 5)])
    s.remove(5, 7)
    assert list(s) == [(1, 5)]
