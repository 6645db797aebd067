"""The token tree of one session: turns merged by exact token prefix and by nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from sandlot.errors import JournalError
from sandlot.ids import Ids, common_prefix, ids_array
from sandlot.trajectory.turn import Turn

_EMPTY = ids_array([])


class _Node:
    """One edge of the radix tree: the tokens at `start:end` of every sequence that runs through it."""

    __slots__ = ("children", "edge", "hasher", "parent", "start", "turn")

    def __init__(self, start: int, edge: Ids, parent: _Node | None) -> None:
        self.start = start
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.turn: str | None = None  # the latest turn whose whole sequence ends here
        self.hasher: hashlib._Hash | None = None  # SHA-256 over all tokens up to the end of the edge

    @property
    def end(self) -> int:
        return self.start + len(self.edge)


class SessionTree:
    """Turns of one session, added in the order they were sampled.

    A turn's *token parent* is its declared parent if it continues the whole of it, else the deepest earlier turn
    whose whole sequence (prompt + output) is an exact prefix of its prompt; of several equal ones the latest.
    Memory grows with new tokens only: edges are views of the turns' own arrays.
    """

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._root = _Node(0, _EMPTY, None)
        self._root.hasher = hashlib.sha256()
        self._turns: dict[str, Turn] = {}
        self._ends: dict[str, _Node] = {}
        self._parents: dict[str, str | None] = {}
        self._children: dict[str, list[str]] = {}
        for turn in turns:
            self.add(turn)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns.values())

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._turns

    def __getitem__(self, turn_id: str) -> Turn:
        return self._turns[turn_id]

    def add(self, turn: Turn) -> str | None:
        """Take in `turn` and return the id of its token parent. The tree is unchanged when the turn is refused."""
        declared = self._check(turn)
        node, depth = self._locate(turn)
        new_ids, output = ids_array(turn.new_ids), ids_array(turn.output_ids)
        hasher = _hash_up_to(node, depth)
        hasher.update(_bytes(new_ids))
        if hasher.hexdigest() != turn.prompt_sha256:
            raise JournalError(
                f"turn {turn.id!r}: its delta does not give the prompt that was sent (SHA-256 differs); "
                "the session cannot be used"
            )
        continues = declared is not None and turn.shared == declared.length
        found = _last_end(node, depth)
        node, depth, passed = _insert(node, depth, new_ids)
        parent = turn.parent if continues else passed or found
        node, depth, _ = _insert(node, depth, output)
        if depth < len(node.edge):
            node = _split(node, depth)
        hasher.update(_bytes(output))
        node.turn, node.hasher = turn.id, hasher
        self._turns[turn.id] = turn
        self._ends[turn.id] = node
        self._parents[turn.id] = parent
        self._children[turn.id] = []
        if parent is not None:
            self._children[parent].append(turn.id)
        return parent

    def mark_delivered(self, turn_id: str) -> None:
        """Note that the whole reply of a turn reached the client."""
        self._turns[turn_id] = replace(self._turns[turn_id], delivered=True)

    def parent(self, turn_id: str) -> str | None:
        """Token parent of a turn, None for a root."""
        return self._parents[turn_id]

    def children(self, turn_id: str) -> tuple[str, ...]:
        """Turns whose token parent is this one, oldest first."""
        return tuple(self._children[turn_id])

    def path(self, turn_id: str) -> list[str]:
        """Turn ids from the root of the token tree to `turn_id`."""
        path: list[str] = []
        at: str | None = turn_id
        while at is not None:
            path.append(at)
            at = self._parents[at]
        return path[::-1]

    def ids(self, turn_id: str) -> Ids:
        """All tokens of a turn, prompt and output."""
        edges: list[Ids] = []
        node: _Node | None = self._ends[turn_id]
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])

    def prompt_ids(self, turn_id: str) -> Ids:
        """The exact prompt that was sent to the engine for a turn."""
        return self.ids(turn_id)[: self._turns[turn_id].prompt_length]

    def _check(self, turn: Turn) -> Turn | None:
        """The declared parent of a turn that fits into this session."""
        if turn.id in self._turns:
            raise JournalError(f"turn {turn.id!r} is there twice; turn ids are unique in a session")
        declared = None
        if turn.parent is not None:
            declared = self._turns.get(turn.parent)
            if declared is None:
                raise JournalError(
                    f"turn {turn.id!r} continues {turn.parent!r}, which is no earlier turn of the session"
                )
        if not 0 <= turn.shared <= (declared.length if declared else 0):
            raise JournalError(f"turn {turn.id!r} shares {turn.shared} tokens with a turn that has fewer")
        if turn.prompt_length != turn.shared + len(turn.new_ids):
            raise JournalError(
                f"turn {turn.id!r} has a prompt of {turn.prompt_length} tokens, "
                f"its delta gives {turn.shared + len(turn.new_ids)}"
            )
        if len(turn.logprobs) != len(turn.output_ids):
            raise JournalError(
                f"turn {turn.id!r} has {len(turn.output_ids)} sampled tokens and {len(turn.logprobs)} logprobs"
            )
        ends = [0, *(last for _, _, last in turn.versions)]
        starts = [first for _, first, _ in turn.versions]
        if ends != sorted(ends) or ends[:-1] != starts or ends[-1] != len(turn.output_ids):
            raise JournalError(
                f"turn {turn.id!r} has weight versions that do not tile its {len(turn.output_ids)} tokens"
            )
        return declared

    def _locate(self, turn: Turn) -> tuple[_Node, int]:
        """Where the shared part of a prompt ends: a node and how many tokens of its edge belong to it."""
        if turn.parent is None or turn.shared == 0:
            return self._root, 0
        node = self._ends[turn.parent]
        while node.start >= turn.shared:
            assert node.parent is not None
            node = node.parent
        return node, turn.shared - node.start


def _bytes(ids: Ids) -> memoryview:
    return np.ascontiguousarray(ids, dtype="<i4").data.cast("B") if len(ids) else memoryview(b"")


def _hash_up_to(node: _Node, depth: int) -> hashlib._Hash:
    """SHA-256 over all tokens up to `depth` tokens into the edge of `node`, from the nearest stored hash above."""
    if depth == len(node.edge) and node.hasher is not None:
        return node.hasher.copy()
    pieces = [node.edge[:depth]]
    at = node.parent
    while at is not None and at.hasher is None:
        pieces.append(at.edge)
        at = at.parent
    hasher = at.hasher.copy() if at is not None and at.hasher is not None else hashlib.sha256()
    for piece in reversed(pieces):
        hasher.update(_bytes(piece))
    return hasher


def _last_end(node: _Node, depth: int) -> str | None:
    """The deepest turn whose sequence ends at or before this place, on the way from the root."""
    at: _Node | None = node if depth == len(node.edge) else node.parent
    while at is not None and at.turn is None:
        at = at.parent
    return at.turn if at is not None else None


def _insert(node: _Node, depth: int, ids: Ids) -> tuple[_Node, int, str | None]:
    """Follow `ids` from a place, growing the tree where it ends or differs.

    Returns the place reached and the deepest turn whose sequence ended on the way.
    """
    done, passed = 0, None
    while done < len(ids):
        if depth == len(node.edge):
            child = node.children.get(int(ids[done]))
            if child is None:
                child = _Node(node.end, ids[done:], node)
                node.children[int(ids[done])] = child
                return child, len(child.edge), passed
            node, depth = child, 0
        common = common_prefix(node.edge[depth:], ids[done:])
        done += common
        depth += common
        if depth == len(node.edge):
            passed = node.turn or passed
        elif done < len(ids):
            node = _split(node, depth)
    return node, depth, passed


def _split(node: _Node, depth: int) -> _Node:
    """Cut the edge of `node` after `depth` tokens; returns the new upper part. What ends at `node` still does."""
    parent = node.parent
    assert parent is not None
    upper = _Node(node.start, node.edge[:depth], parent)
    parent.children[int(node.edge[0])] = upper
    upper.children[int(node.edge[depth])] = node
    node.start, node.edge, node.parent = node.start + depth, node.edge[depth:], upper
    return upper
