"""Which of the known markers a checkpoint has: those that its template writes, else those of its vocabulary."""

from __future__ import annotations

from collections.abc import Container

from sandlot.chat.forms import detect_form
from sandlot.chat.markup import CALL_PAIRS, TEXT_MARKERS, THINK_PAIRS, Markup, Pair
from sandlot.chat.tokenizer import ChatTokenizer
from sandlot.chat.xml_calls import FUNCTION


def think_pair(template: str, vocabulary: Container[str]) -> Pair | None:
    """The markers of thoughts that a template writes, or else a vocabulary has."""
    return next((p for place in (template, vocabulary) for p in THINK_PAIRS if (p.sign or p.opening) in place), None)


def markup_of(tokenizer: ChatTokenizer, template: str, form: str = "") -> Markup:
    """The markers that a template writes and a vocabulary has; `form` decides where they leave the form open."""
    known = tokenizer.control_ids
    think = think_pair(template, known) or THINK_PAIRS[0]
    call = next((pair for place in (template, known) for pair in CALL_PAIRS if pair[0] in place), CALL_PAIRS[0])
    alias = tokenizer.conceal
    return Markup(
        think_open=alias(think.opening),
        think_close=alias(think.closing),
        call_open=alias(call[0]),
        call_close=alias(call[1]),
        calls_are_tokens=call[0] in known and call[1] in known,
        xml=FUNCTION in template,
        around_text=tuple(concealed for text in TEXT_MARKERS if (concealed := alias(text)) != text),
        form=form or detect_form(template, known),
        alias=alias,
    )
