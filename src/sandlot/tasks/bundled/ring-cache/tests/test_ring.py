from ringcache.ring import Node, Ring


def test_order():
    ring = Ring()
    nodes = [Node(k) for k in "abc"]
    for node in nodes:
        ring.add_first(node)
    assert [n.key for n in ring] == ["c", "b", "a"]
    ring.move_first(nodes[0])
    assert [n.key for n in ring] == ["a", "c", "b"]
    ring.remove(nodes[2])
    assert [n.key for n in ring] == ["a", "b"]
    assert ring.last is nodes[1]


def test_empty_ring_has_no_last():
    assert Ring().last is None
