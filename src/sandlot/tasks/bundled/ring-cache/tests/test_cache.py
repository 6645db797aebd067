import pytest

from ringcache import LRUCache


def test_store_and_read():
    c = LRUCache(capacity=2)
    c["a"] = 1
    assert c["a"] == 1
    assert c.get("b") is None
    with pytest.raises(KeyError):
        c["b"]


def test_oldest_entry_goes():
    c = LRUCache(capacity=2)
    for key in "abc":
        c[key] = key.upper()
    assert list(c) == ["c", "b"]
    assert c.stats.evictions == 1


def test_statistics():
    c = LRUCache(capacity=2)
    c["a"] = 1
    c.get("a")
    c.get("b")
    assert (c.stats.hits, c.stats.misses, c.stats.evictions) == (1, 1, 0)


def test_delete_and_clear():
    c = LRUCache(capacity=2)
    c["a"] = 1
    del c["a"]
    assert len(c) == 0
    c["b"] = 2
    c.clear()
    assert "b" not in c
