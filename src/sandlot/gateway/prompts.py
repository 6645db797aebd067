"""The prompts of a session's next turns, put together from what its last turns were asked and said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandlot.ids import Ids, PromptIds
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Turn, ids_hash

if TYPE_CHECKING:
    from _hashlib import HASH as IdsHash

_TOKENS = 1_000_000
"""Tokens up to which branches are kept whole, about 9 bytes each. Others are read from the tree, which costs a few
milliseconds."""


@dataclass(frozen=True)
class _Asked:
    ids: PromptIds
    hash: IdsHash


class Prompts:
    """Keeps the newest turn of each of the last branches with the prompt it was sampled from."""

    def __init__(self, tree: SessionTree) -> None:
        self._tree = tree
        self._asked: dict[str, _Asked] = {}

    def continued(self, turn_id: str, new: Ids) -> PromptIds:
        """Prompt and output of a turn, then `new`."""
        if (asked := self._asked.get(turn_id)) is not None:
            return asked.ids.followed_by(self._tree[turn_id].output_ids, new)
        return PromptIds(self._tree.ids(turn_id)).followed_by(new)

    def hashed(self, turn_id: str | None, prompt: PromptIds) -> IdsHash:
        """What proves a prompt that goes on from a turn, or from none: only what is new in it is hashed."""
        if turn_id is not None and (asked := self._asked.get(turn_id)) is not None:
            return ids_hash(prompt.array[len(asked.ids) :], asked.hash)
        return ids_hash(prompt.array)

    def keep(self, turn: Turn, prompt: PromptIds, hash_: IdsHash) -> None:
        """Remember what a turn was sampled from, instead of what its parent was."""
        if turn.parent is not None:
            self._asked.pop(turn.parent, None)
        self._asked[turn.id] = _Asked(prompt, hash_)
        kept = sum(len(asked.ids) for asked in self._asked.values())
        while kept > _TOKENS and len(self._asked) > 1:
            kept -= len(self._asked.pop(next(iter(self._asked))).ids)
