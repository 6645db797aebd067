import pytest

from waymark import Graph, GraphError, Route, cheapest_route, distances


def line():
    g = Graph()
    g.add_edge("a", "b", 3)
    g.add_edge("b", "c", 4)
    return g


def test_route_along_a_line():
    assert cheapest_route(line(), "a", "c") == Route(7, ["a", "b", "c"])


def test_route_to_itself():
    assert cheapest_route(line(), "b", "b") == Route(0, ["b"])


def test_distances():
    assert distances(line(), "b") == {"b": 0, "a": 3, "c": 4}


def test_no_route():
    g = line()
    g.add_node("island")
    with pytest.raises(GraphError, match="no route"):
        cheapest_route(g, "a", "island")
