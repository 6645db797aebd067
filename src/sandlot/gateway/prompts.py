"""The prompts of a session's turns: put together from what its last turns were asked and said, or rendered in full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandlot.chat.base import ChatFormat
from sandlot.chat.continuity import Match
from sandlot.chat.messages import Message
from sandlot.gateway.wire.base import ChatRequest
from sandlot.ids import Ids, PromptIds, ids_array
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Turn, ids_hash

if TYPE_CHECKING:
    from _hashlib import HASH as IdsHash

_SHORT = 8_000
"""Characters of new text up to which it is rendered on the event loop, which is quicker than asking a thread."""
_FRAME = 100
"""Characters that take as long to render as a message takes without its text."""
_TOKENS = 1_000_000
"""Tokens up to which branches are kept whole, about 9 bytes each. Others are read from the tree, which costs a few
milliseconds."""


@dataclass(frozen=True)
class _Asked:
    ids: PromptIds
    hash: IdsHash


class Prompts:
    """Makes prompts; keeps the newest turn of each of the last branches with the prompt it was sampled from."""

    def __init__(self, fmt: ChatFormat, tree: SessionTree, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._format = fmt
        self._tree = tree
        self._in_thread = in_thread
        self._rendering = asyncio.Lock()
        self._asked: dict[str, _Asked] = {}
        self._kept = 0

    async def of(self, match: Match, request: ChatRequest, call_names: Sequence[str]) -> tuple[PromptIds, Ids]:
        """Ids of the whole prompt, and of its part after the continued turn, whose calls have these names."""
        fmt, tools = self._format, request.tools
        if match.turn is not None and fmt.can_extend:
            output = self._tree[match.turn].output_ids.tolist()
            size = _size(match.new)
            if any(message.tool_calls for message in match.new):
                size = max(size, request.size)  # what their arguments hold is not told by their text
            if size <= _SHORT:
                tail = fmt.extend(output, call_names, match.new, tools)
            else:
                tail = await self._rendered(size, fmt.extend, output, call_names, match.new, tools)
            if tail is not None:
                new = ids_array(tail)
                return self._continued(match.turn, new), new
        size = max(_size(request.messages), request.size)
        whole: PromptIds = await self._rendered(size, lambda: PromptIds.of(fmt.render(request.messages, tools)))
        return whole, whole.array

    async def _rendered(self, size: int, render: Callable[..., Any], *args: Any) -> Any:
        """What `render` gives, off the event loop; one at a time, so that other sessions have their turn between."""
        async with self._rendering:
            return await self._in_thread(render, *args, size=size)

    def _continued(self, turn_id: str, new: Ids) -> PromptIds:
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
        if turn.parent in self._asked:
            self._forget(turn.parent)
        self._asked[turn.id] = _Asked(prompt, hash_)
        self._kept += len(prompt)
        while self._kept > _TOKENS and len(self._asked) > 1:
            self._forget(next(iter(self._asked)))

    def _forget(self, turn_id: str) -> None:
        self._kept -= len(self._asked.pop(turn_id).ids)


def _size(messages: Sequence[Message]) -> int:
    """Characters that they tell, and those that the frame of each is worth."""
    return sum(len(message.text) + _FRAME for message in messages)
