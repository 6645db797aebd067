from spanset import SpanSet


def test_union():
    assert SpanSet([(1, 3)]) | SpanSet([(2, 5)]) == SpanSet([(1, 5)])


def test_intersection():
    assert SpanSet([(1, 3)]) & SpanSet([(2, 5)]) == SpanSet([(2, 3)])


def test_difference():
    assert SpanSet([(1, 3)]) - SpanSet([(2, 5)]) == SpanSet([(1, 2)])
