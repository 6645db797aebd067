from ringcache import memoize


def test_calls_once_per_argument():
    calls = []

    @memoize(capacity=2)
    def double(n):
        calls.append(n)
        return 2 * n

    assert [double(1), double(1), double(2)] == [2, 2, 4]
    assert calls == [1, 2]
