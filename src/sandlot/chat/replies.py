"""From sampled ids to a reply: what a chat format does with its tokenizer's text and its markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sandlot.chat.markup import Markup
from sandlot.chat.messages import ParsedCall, Reply, Tool
from sandlot.chat.parse import parse_reply
from sandlot.chat.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class ReplyReader:
    """Reads replies by their decoded text, in which control tokens are aliases."""

    tokenizer: ChatTokenizer
    markup: Markup
    stop_token_ids: tuple[int, ...]

    def read(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool], *, truncated: bool
    ) -> Reply:
        """Take a sampled answer apart; see `sandlot.chat.parse` for what is trimmed and kept."""
        return parse_reply(
            self.tokenizer.decode(self.without_stop(output_ids)),
            thought_open=self.thought_open(prompt_ids),
            markup=self.markup,
            tools=tools,
            truncated=truncated,
            reveal=self.tokenizer.reveal,
        )

    def without_stop(self, output_ids: Sequence[int]) -> Sequence[int]:
        """A sampled answer without the stop tokens at its end."""
        end = len(output_ids)
        while end and output_ids[end - 1] in self.stop_token_ids:
            end -= 1
        return output_ids[:end]

    def thought_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the generation prompt opens a thought and leaves it open."""
        opening = self.tokenizer.control_ids.get(self.tokenizer.reveal(self.markup.think_open))
        closing = self.tokenizer.control_ids.get(self.tokenizer.reveal(self.markup.think_close))
        start = len(prompt_ids)
        for token in _backwards(prompt_ids):
            if token in self.stop_token_ids:
                break
            start -= 1
            if opening is not None and token in (opening, closing):
                return token == opening
        if opening is not None:
            return False
        tail = self.tokenizer.decode(prompt_ids[max(start, len(prompt_ids) - 32) :])
        return tail.rstrip().endswith(self.markup.think_open)


def unreadable(text: str, *, truncated: bool) -> Reply:
    """An answer at which a parser failed that is not ours: all of it is text, and that is counted."""
    return Reply(text, "", (ParsedCall("", text, text, "missing_name"),), truncated)


def _backwards(ids: Sequence[int]) -> Iterator[int]:
    """Ids from the last to the first, taken in slices: single ones are slow to get from an array."""
    for end in range(len(ids), 0, -256):
        yield from reversed(ids[max(0, end - 256) : end])
