"""From a canonical conversation to the text that is encoded: guarded, rendered, its control tokens as aliases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandlot.chat.literals import Guard
from sandlot.chat.messages import Message, Tool
from sandlot.chat.roles import Traits, conform, template_messages, untrusted_texts
from sandlot.chat.template import ChatTemplate, TemplateError
from sandlot.chat.tokenizer import ChatTokenizer


def render_text(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    traits: Traits,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    generation_prompt: bool,
) -> str:
    """Render with untrusted control strings cut; the template's own become aliases."""
    shown = conform(messages, traits)
    functions: list[dict[str, Any]] = [t.as_function() for t in tools]
    try:
        guard = Guard(tokenizer.literals, untrusted_texts(shown, functions))
        text = template.render(
            template_messages(shown, guard, native_ids=traits.native_ids),
            guard.value(functions),
            generation_prompt=generation_prompt,
        )
    except RecursionError as e:
        raise TemplateError("a tool or tool call in the conversation is nested too deeply to render") from e
    return guard.clean(tokenizer.conceal(text))
