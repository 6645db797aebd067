import itertools
import random

from waymark import Graph, Route, cheapest_route, distances


def detour():
    g = Graph(directed=True)
    g.add_edge("home", "shop", 10)
    g.add_edge("home", "park", 1)
    g.add_edge("park", "shop", 2)
    g.add_edge("shop", "work", 1)
    return g


def test_a_detour_can_be_cheaper():
    assert cheapest_route(detour(), "home", "work") == Route(4, ["home", "park", "shop", "work"])


def test_the_goal_itself_is_improved():
    assert cheapest_route(detour(), "home", "shop") == Route(3, ["home", "park", "shop"])


def test_distances_see_detours():
    assert distances(detour(), "home") == {"home": 0, "shop": 3, "park": 1, "work": 4}


def test_nodes_of_different_types():
    g = Graph()
    g.add_edge("hub", ("x", 1), 2)
    g.add_edge("hub", "y", 2)
    g.add_edge("hub", 7, 2)
    assert distances(g, "hub") == {"hub": 0, ("x", 1): 2, "y": 2, 7: 2}


def test_edges_that_cost_nothing():
    g = Graph()
    g.add_edge(1, 2, 0)
    g.add_edge(2, 3, 0)
    g.add_edge(1, 3, 1)
    assert distances(g, 1) == {1: 0, 2: 0, 3: 0}


def test_against_all_pairs():
    rng = random.Random(7)
    for _ in range(30):
        size = rng.randint(2, 9)
        g = Graph(directed=True)
        best = {(a, b): 0 if a == b else float("inf") for a in range(size) for b in range(size)}
        for node in range(size):
            g.add_node(node)
        for a, b in itertools.permutations(range(size), 2):
            if rng.random() < 0.5:
                cost = rng.randint(0, 20)
                g.add_edge(a, b, cost)
                best[a, b] = cost
        for k, a, b in itertools.product(range(size), repeat=3):
            best[a, b] = min(best[a, b], best[a, k] + best[k, b])
        expected = {b: best[0, b] for b in range(size) if best[0, b] < float("inf")}
        assert distances(g, 0) == expected


def test_a_long_chain():
    g = Graph()
    for n in range(3000):
        g.add_edge(n, n + 1)
    assert cheapest_route(g, 0, 3000).cost == 3000
