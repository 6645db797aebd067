"""The token contract on random conversations whose every text is hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sandlot.chat.format import TemplateFormat
from sandlot.chat.literals import Guard
from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.roles import template_messages
from sandlot.chat.template import TemplateError
from sandlot.engine.client import with_ids
from support.chat_templates import SHAPES, split_turn
from support.profiles import few

CONTROLS = sorted({t for shape in SHAPES.values() for t in shape.tokens})
PIECES = [
    *CONTROLS,
    *(t[: len(t) // 2] for t in CONTROLS),
    *(t[len(t) // 2 :] for t in CONTROLS),
    *("<", ">", "|", "[", "]", "\n", "\n\n", " ", "  ", "hello", "he", "llo", "x", "'", '"', "\\", "{{", "%}"),
    *("é", "\U0001f600", "\U000102a0", "\U0010fffd", "\u2028", "\x00"),
]


def spell(number: int) -> str:
    """A text of a few pieces for a number: one cheap draw, and smaller numbers are shorter texts."""
    pieces = []
    while number:
        number, piece = divmod(number, len(PIECES) + 1)
        pieces.append(PIECES[piece - 1] if piece else "")
    return "".join(pieces)


texts = st.integers(0, (len(PIECES) + 1) ** 6).map(spell)
shared = settings(max_examples=20 + settings.default.max_examples // len(SHAPES))
"""For a property that is tried on every shape: the shapes share the examples of one."""
names = st.sampled_from(["read", "list"])


@st.composite
def turns(draw: st.DrawFn, k: int = 0) -> tuple[Message, list[Message]]:
    """An assistant message and what comes after it: results for its calls, users, a system message."""
    called = draw(st.lists(names, max_size=3))
    arguments = st.one_of(texts, st.dictionaries(texts, st.one_of(texts, st.lists(texts, max_size=2)), max_size=2))
    calls = tuple(ToolCall(name, draw(arguments), f"c{k}-{i}") for i, name in enumerate(called))
    turn = Message("assistant", draw(texts), draw(texts), calls)
    after = [Message("tool", draw(texts), tool_call_id=c.id, tool_name=c.name) for c in calls]
    after += [Message("user", t) for t in draw(st.lists(texts, min_size=not calls, max_size=2))]
    if draw(st.booleans()):
        after.append(Message("system", draw(texts)))
    return turn, after


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages = [Message("system", draw(texts))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(texts)))
    for k in range(draw(st.integers(0, 3))):
        turn, after = draw(turns(k))
        messages += [turn, *after]
    return messages


tools = st.lists(
    st.builds(Tool, names, texts, st.fixed_dictionaries({"properties": st.dictionaries(texts, texts, max_size=2)})),
    max_size=2,
)


def harmless(messages: list[Message]) -> list[Message]:
    """The same conversation with every text that says something replaced by `x`."""

    def plain(text: str) -> str:
        return "x" if text else ""

    def call(c: ToolCall) -> ToolCall:
        return replace(c, arguments={"x": "x"})

    return [
        replace(m, text=plain(m.text), reasoning=plain(m.reasoning), tool_calls=tuple(map(call, m.tool_calls)))
        for m in messages
    ]


def control_tokens(chat: TemplateFormat, ids: list[int]) -> list[int]:
    control = set(chat.tokenizer.control_ids.values())
    return [i for i in ids if i in control]


@pytest.mark.parametrize("name", SHAPES)
def test_content_never_becomes_a_control_token(formats: Mapping[str, TemplateFormat], name: str) -> None:
    chat = formats[name]

    @shared
    @given(conversations(), tools)
    def check(messages: list[Message], offered: list[Tool]) -> None:
        if name == "xml":  # it writes one tag for each argument
            messages = [replace(m, tool_calls=()) if m.role == "assistant" else m for m in messages]
            messages = [m for m in messages if m.role != "tool"]
        if name == "plain":  # it trims
            assume(all(m.text.strip() or m.tool_calls for m in messages))
        plain = [replace(t, description="x", parameters={}) for t in offered]
        try:
            expected = chat.render(harmless(messages), plain)
        except TemplateError:
            with pytest.raises(TemplateError):
                chat.render(messages, offered)
            return
        assert control_tokens(chat, chat.render(messages, offered)) == control_tokens(chat, expected)

    check()


@given(conversations(), tools)
def test_the_prompt_says_what_the_template_says(
    formats: Mapping[str, TemplateFormat], messages: list[Message], offered: list[Tool]
) -> None:
    """Cutting control strings changes no character of the prompt."""
    chat = formats["embedded"]
    unguarded = Guard(chat.tokenizer.literals, [])
    text = chat.template.render(
        template_messages(messages, unguarded), [t.as_function() for t in offered], generation_prompt=True
    )
    assert chat.decode(chat.render(messages, offered)) == text


@few
@given(conversations(), tools)
def test_a_prompt_is_its_text_encoded(
    formats: Mapping[str, TemplateFormat], messages: list[Message], offered: list[Tool]
) -> None:
    """It is put together from pieces; and so is its JSON text."""
    for chat in formats.values():
        try:
            text = chat.text(messages, offered)
        except TemplateError:
            continue
        prompt = chat.render(messages, offered)
        assert prompt == chat.encode(text)
        assert json.loads(with_ids({}, "ids", prompt)) == {"ids": list(prompt)}


@given(texts)
def test_plain_text_comes_back(formats: Mapping[str, TemplateFormat], text: str) -> None:
    for chat in formats.values():
        ids = chat.encode(text)
        assert chat.decode(ids) == text
        assert control_tokens(chat, ids) == []


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.can_extend])
def test_continuation_is_the_full_render(formats: Mapping[str, TemplateFormat], name: str) -> None:
    """Wherever a conversation is split after an assistant message, the new part is the tail of the whole."""
    chat = formats[name]

    @shared
    @given(conversations(), turns(9), st.none() | turns(10), tools)
    def check(
        base: list[Message],
        step: tuple[Message, list[Message]],
        foreign: tuple[Message, list[Message]] | None,
        offered: list[Tool],
    ) -> None:
        turn, after = step
        if foreign:  # a turn that was not sampled here is a new message like any other
            after = [*after, foreign[0], *foreign[1]]
        if name in ("stripping", "xml"):  # they drop old thoughts, or the prompt opens one that history has not
            turn = replace(turn, reasoning="")
        try:
            full = chat.render([*base, turn, *after], offered)
        except TemplateError:
            return
        called = [c.name for c in turn.tool_calls]
        tail = chat.extend(chat.stop_token_ids, called, after, offered)
        if tail is None:
            assert chat.declines_at & {m.role for m in after}
            return
        assert full[len(full) - len(tail) :] == tail
        if name == "embedded":
            prompt, output = chat.render(base, offered), split_turn(chat, base, turn, offered)
            assert full == [*prompt, *output, *chat.extend(output, called, after, offered)]
            assert full == [*prompt, *output[:-1], *chat.extend(output[:-1], called, after, offered)]

    check()


@given(conversations(), st.data())
def test_a_session_keeps_the_ids_that_were_sampled(
    formats: Mapping[str, TemplateFormat], messages: list[Message], data: st.DataObject
) -> None:
    """Turn after turn, with outputs tokenized in odd ways or cut short: nothing sampled is ever encoded anew."""
    chat = formats["embedded"]
    ids, history = chat.render(messages, ()), list(messages)
    for k in range(data.draw(st.integers(1, 3))):
        text = data.draw(texts)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        output = [i for piece in pieces for i in chat.encode(piece)]
        if data.draw(st.booleans()):
            output.append(chat.stop_token_ids[0])
        reply = chat.parse(output, ids, (), truncated=not output or output[-1] not in chat.stop_token_ids)
        assert (reply.text, reply.calls, reply.reasoning) == (text, (), "")
        _, after = data.draw(turns(k))
        after = [m for m in after if m.role != "tool"] or [Message("user", "go on")]
        tail = chat.extend(output, (), after, ())
        ids = [*ids, *output, *tail]
        history += [reply.as_message(), *after]
        full = chat.render(history, ())
        assert chat.decode(ids) == chat.decode(full)
        assert control_tokens(chat, ids) == control_tokens(chat, full)
        assert full[len(full) - len(tail) :] == tail
