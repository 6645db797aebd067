import pytest

from waymark import Graph, GraphError


def test_undirected_edges_go_both_ways():
    g = Graph()
    g.add_edge("a", "b", 2)
    assert g.neighbours("b") == [("a", 2)]
    assert list(g.edges()) == [("a", "b", 2)]


def test_directed_edges_go_one_way():
    g = Graph(directed=True)
    g.add_edge("a", "b")
    assert g.neighbours("b") == []


def test_negative_costs_are_refused():
    with pytest.raises(GraphError, match="less than nothing"):
        Graph().add_edge(1, 2, -1)


def test_unknown_node():
    with pytest.raises(GraphError, match="no node"):
        Graph().neighbours("x")
