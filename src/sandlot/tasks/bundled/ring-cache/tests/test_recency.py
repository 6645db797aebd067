from ringcache import LRUCache, memoize


def full():
    c = LRUCache(capacity=2)
    c["a"] = 1
    c["b"] = 2
    return c


def test_reading_an_item_keeps_it():
    c = full()
    assert c["a"] == 1
    c["c"] = 3
    assert list(c) == ["c", "a"]


def test_get_keeps_an_item():
    c = full()
    assert c.get("a") == 1
    c["c"] = 3
    assert "a" in c
    assert "b" not in c


def test_overwriting_throws_nothing_out():
    c = full()
    c["a"] = 10
    assert (c["b"], c["a"]) == (2, 10)
    assert c.stats.evictions == 0


def test_overwriting_is_a_use():
    c = full()
    c["a"] = 10
    c["c"] = 3
    assert list(c) == ["c", "a"]
    assert c.stats.evictions == 1


def test_looking_is_no_use():
    c = full()
    assert "a" in c
    assert len(c) == 2
    assert list(c) == ["b", "a"]
    c["c"] = 3
    assert "a" not in c


def test_a_missed_read_changes_nothing():
    c = full()
    assert c.get("x", 0) == 0
    assert list(c) == ["b", "a"]


def test_memoize_keeps_what_is_called():
    calls = []

    @memoize(capacity=2)
    def double(n):
        calls.append(n)
        return 2 * n

    for n in (1, 2, 1, 3, 1):
        double(n)
    assert calls == [1, 2, 3]


def test_capacity_of_one():
    c = LRUCache(capacity=1)
    c["a"] = 1
    c["a"] = 2
    assert c["a"] == 2
    c["b"] = 3
    assert list(c) == ["b"]
