"""The token tree: which turn continues which, at any length, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from sandlot.errors import JournalError
from sandlot.trajectory.audit import audit
from sandlot.trajectory.samples import linearize
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Turn, ids_sha256
from support.sessions import SessionBuilder, long_chain, make_turn


@pytest.mark.parametrize("turns", [600, 1_200, 5_000])
def test_a_long_session_is_one_branch(turns: int) -> None:
    """Walks are iterative: 600 turns were enough to end a recursive one."""
    session = long_chain(turns)
    tree = SessionTree(session.turns)
    last = session.turns[-1]
    assert len(tree.path(last.id)) == turns
    assert ids_sha256(tree.prompt_ids(last.id)) == last.prompt_sha256
    samples = linearize(session.turns, episode_id="e", group_id="g", reward=1.0)
    assert len(samples) == 1
    assert len(samples[0].spans) == turns
    audit(session.turns, samples).raise_for_violations()


def _nodes(tree: SessionTree) -> list[np.ndarray]:
    edges, todo = [], [tree._root]
    while todo:
        node = todo.pop()
        edges.append(node.edge)
        todo += node.children.values()
    return edges


def test_memory_grows_with_new_tokens_only() -> None:
    """Every edge is a view of a turn's own array, and no token is held for two turns."""
    session = SessionBuilder()
    turn = session.root(range(1000), (1, 2))
    for k in range(50):
        turn = session.follow(turn, (3 + k, 4), (5, 6))
        session.fork(turn, turn.length - 3, (900 + k,), (7,))
    tree = SessionTree(session.turns)
    edges = _nodes(tree)
    assert sum(len(e) for e in edges) <= sum(len(t.new_ids) + len(t.output_ids) for t in session.turns)
    own = [a for t in session.turns for a in (t.new_ids, t.output_ids)]
    assert all(e.base is not None and any(np.shares_memory(e, a) for a in own) for e in edges if len(e))


def test_five_thousand_forks_of_one_conversation_stay_cheap() -> None:
    """Forks that share a long head with each other: neither the head is held twice nor every turn looked at."""
    head = tuple(range(2_000))
    turns = [make_turn("t0", head, (1,))]
    turns += [
        make_turn(f"t{k}", (*head, 1, k, k + 1), (k,), parent=f"t{k - 1}", shared=2_001 if k > 1 else 2_000)
        for k in range(1, 5_000)
    ]
    tree = SessionTree(turns)
    assert {tree.parent(t.id) for t in turns[1:]} == {"t0"}
    assert sum(len(e) for e in _nodes(tree)) < 20_000


def test_the_deepest_turn_is_the_parent_whatever_came_last() -> None:
    """c05: two sub-agents interleaved with their parent; each request attaches to the chain it extends."""
    s = SessionBuilder()
    p1 = s.root((1, 10), (11,))
    a1 = s.root((2, 20), (21,), branch="subagent:a")
    b1 = s.root((3, 30), (31,), branch="subagent:b")
    a2 = s.add(s.full[a1.id] + (22,), (23,), branch="subagent:a")  # without a declared parent
    p2 = s.add(s.full[p1.id] + (12,), (13,))
    b2 = s.add(s.full[b1.id] + (32,), (33,), branch="subagent:b")
    a3 = s.add(s.full[a2.id], (24,), branch="subagent:a")  # nothing new
    tree = SessionTree(s.turns)
    assert [tree.parent(t.id) for t in (p1, a1, b1, a2, p2, b2, a3)] == [None, None, None, "t1", "t0", "t2", "t3"]
    samples = linearize(s.turns, episode_id="e", group_id="g", reward=1.0)
    assert [(x.branch, len(x.spans)) for x in samples] == [("main", 2), ("subagent:b", 2), ("subagent:a", 3)]
    assert {x.group_id for x in samples} == {"g"}


def test_a_declared_parent_decides_between_equal_sequences() -> None:
    s = SessionBuilder()
    first = s.root((1, 2), (3,))
    s.root((1, 2), (3,))
    declared = s.follow(first, (4,), (5,))
    undeclared = s.add((1, 2, 3, 6), (7,))
    tree = SessionTree(s.turns)
    assert tree.parent(declared.id) == "t0"
    assert tree.parent(undeclared.id) == "t1", "the latest of equal ones"
    assert (tree.children("t0"), tree.children("t1")) == (("t2",), ("t3",))


def test_a_retried_first_prompt_is_a_sibling() -> None:
    """h04 (4): there is no earlier point to go back to, and none is needed."""
    s = SessionBuilder()
    s.root((1, 2), (3,), delivered=False)
    again = s.add((1, 2), (4, 5), parent="t0", shared=2)
    s.follow(again, (6,), (7,))
    tree = SessionTree(s.turns)
    assert [tree.parent(t.id) for t in s.turns] == [None, None, "t1"]


def test_an_answer_that_ends_inside_another_is_no_ancestor_of_it() -> None:
    s = SessionBuilder()
    short = s.root((1,), (2, 3))
    long = s.root((1,), (2, 3, 4))
    after = s.add((1, 2, 3, 4, 5), (6,))
    tree = SessionTree(s.turns)
    assert tree.parent(after.id) == long.id
    assert tree.children(short.id) == ()


def test_a_turn_can_be_marked_delivered_later() -> None:
    tree = SessionTree([make_turn("t0", (1,), (2,), delivered=False)])
    tree.mark_delivered("t0")
    assert tree["t0"].delivered
    assert "t0" in tree
    assert len(tree) == 1
    assert [t.id for t in tree] == ["t0"]


ROOT = make_turn("t0", (1, 2), (3, 4))
NEXT = make_turn("t1", (1, 2, 3, 4, 5), (6,), parent="t0", shared=4)


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (replace(NEXT, id="t0"), "there twice"),
        (replace(NEXT, parent="t7"), "no earlier turn"),
        (replace(NEXT, shared=5, prompt_length=6), "shares 5 tokens with a turn that has fewer"),
        (replace(NEXT, shared=-1), "shares -1"),
        (replace(NEXT, parent=None), "shares 4"),
        (replace(NEXT, prompt_length=4), "prompt of 4 tokens, its delta gives 5"),
        (replace(NEXT, new_ids=np.array([9], dtype=np.int32)), "SHA-256 differs"),
        (replace(NEXT, shared=3, new_ids=np.array([5, 5], dtype=np.int32)), "SHA-256 differs"),
        (replace(NEXT, logprobs=np.array([])), "1 sampled tokens and 0 logprobs"),
        (replace(NEXT, output_ids=np.array([6, 6], dtype=np.int32)), "2 sampled tokens and 1 logprobs"),
        (replace(NEXT, versions=(("v", 0, 2),)), "do not tile"),
        (replace(NEXT, versions=(("v", 0, 1), ("w", 0, 1))), "do not tile"),
        (replace(NEXT, versions=()), "do not tile"),
    ],
)
def test_a_turn_that_does_not_fit_leaves_the_tree_as_it_was(turn: Turn, says: str) -> None:
    tree = SessionTree([ROOT])
    with pytest.raises(JournalError, match=says):
        tree.add(turn)
    assert len(tree) == 1
    assert tree.children("t0") == ()
    assert tree.add(NEXT) == "t0"
    assert tree.ids("t1").tolist() == [1, 2, 3, 4, 5, 6]
