"""The prompts of a session's next turns, put together from what its last turns were asked and said."""

from __future__ import annotations

from sandlot.engine.ids import PromptIds
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Ids, Turn

_BRANCHES = 4
"""How many branches are kept whole. Others are read from the tree, which costs a few milliseconds."""


class Prompts:
    """Keeps the newest turn of each of the last few branches with the prompt it was sampled from."""

    def __init__(self, tree: SessionTree) -> None:
        self._tree = tree
        self._asked: dict[str, PromptIds] = {}

    def continued(self, turn_id: str, new: Ids) -> PromptIds:
        """Prompt and output of a turn, then `new`."""
        if (asked := self._asked.get(turn_id)) is not None:
            return asked.followed_by(self._tree[turn_id].output_ids, new)
        return PromptIds(self._tree.ids(turn_id)).followed_by(new)

    def keep(self, turn: Turn, prompt: PromptIds) -> None:
        """Remember what a turn was sampled from, instead of what its parent was."""
        if turn.parent is not None:
            self._asked.pop(turn.parent, None)
        self._asked[turn.id] = prompt
        if len(self._asked) > _BRANCHES:
            del self._asked[next(iter(self._asked))]
