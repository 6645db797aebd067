from waymark import Graph
from waymark.walk import breadth_first, components


def test_nearest_first():
    g = Graph()
    for start, end in [("a", "b"), ("a", "c"), ("b", "d"), ("c", "e")]:
        g.add_edge(start, end)
    assert list(breadth_first(g, "a")) == ["a", "b", "c", "d", "e"]


def test_components():
    g = Graph()
    g.add_edge(1, 2)
    g.add_edge(3, 4)
    g.add_node(5)
    assert components(g) == [{1, 2}, {3, 4}, {5}]
