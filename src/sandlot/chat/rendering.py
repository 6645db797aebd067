"""From a canonical conversation to a prompt: guarded, rendered, its control strings told from what only looks so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandlot.chat.literals import Guard, Literals
from sandlot.chat.messages import Message, Tool
from sandlot.chat.roles import Traits, conform, template_messages, untrusted_texts
from sandlot.chat.template import ChatTemplate, TemplateError
from sandlot.chat.tokenizer import ChatTokenizer
from sandlot.ids import PromptIds


@dataclass(frozen=True)
class Rendering:
    """A template with what it takes, and the tokenizer that reads what it writes.

    `kept` are the strings that stay text in untrusted texts: those of control tokens, and what the template itself
    would read out of a text.
    """

    tokenizer: ChatTokenizer
    template: ChatTemplate
    traits: Traits
    kept: Literals

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool = True) -> str:
        """The text of a conversation in which the template's own control strings are aliases."""
        text, guard = self._written(messages, tools, generation_prompt)
        return guard.clean(self.tokenizer.conceal(text))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> PromptIds:
        """The ids of that text, with the generation prompt."""
        return self.tokenizer.prompt(*self._written(messages, tools, True))

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool
    ) -> tuple[str, Guard]:
        """What the template writes, control strings in untrusted texts cut by the guard."""
        shown = conform(messages, self.traits)
        functions: list[dict[str, Any]] = [t.as_function() for t in tools]
        try:
            guard = Guard(self.kept, untrusted_texts(shown, functions))
            text = self.template.render(
                template_messages(shown, guard, native_ids=self.traits.native_ids),
                guard.value(functions),
                generation_prompt=generation_prompt,
            )
        except RecursionError as e:
            raise TemplateError("a tool or tool call in the conversation is nested too deeply to render") from e
        return text, guard
