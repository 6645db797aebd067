"""The chat format of one model: messages to token ids, and what the model wrote back to a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from sandlot.chat.messages import Message, Reply, Tool


@runtime_checkable
class ChatFormat(Protocol):
    """Rendering and parsing for one tokenizer and chat template. Pure and thread-safe; no I/O after loading.

    In all three, special-token strings inside message or tool content are encoded as ordinary text.
    """

    name: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    can_extend: bool
    """Whether `extend` was proven equal to full renders on the probe conversations at load."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[int]:
        """Ids of the whole prompt, ending with the generation prompt."""
        ...

    def extend(
        self,
        last_output: Sequence[int],
        call_names: Sequence[str],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Ids that follow a sampled turn: its close where the sample lacks it, `new`, the generation prompt.

        `last_output` are the sampled ids of the turn before (they are not re-encoded, only looked at for the
        stop token); `call_names` the names of the calls in it. The prompt is then
        `previous prompt + last_output + extend(...)`. None where this turn cannot be continued, or where the policy
        `thinking = template` says that it should not be: the conversation is then rendered in full.
        """
        ...

    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool], *, truncated: bool
    ) -> Reply:
        """Take a sampled answer apart. `prompt_ids` tells whether a thinking block is already open."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings in it stay text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        ...
