"""From sampled ids to a reply: what a chat format does with its tokenizer's text and its markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sandlot.chat.markup import Markup
from sandlot.chat.messages import Reply, Tool
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
        while start and prompt_ids[start - 1] not in self.stop_token_ids:
            start -= 1
            if opening is not None and prompt_ids[start] in (opening, closing):
                return prompt_ids[start] == opening
        if opening is not None:
            return False
        tail = self.tokenizer.decode(prompt_ids[max(start, len(prompt_ids) - 32) :])
        return tail.rstrip().endswith(self.markup.think_open)
