"""What was said, read back from ids: right for every template that can be continued, whatever the texts contain."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from sandlot.chat.format import TemplateFormat
from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.unrender import unrender_prompt, unrender_tail
from support.chat_templates import SHAPES, split_turn

READ = Tool("read", "Read a file", {"type": "object", "properties": {"path": {"type": "string"}}})
TEXTS = (
    "two files\n\n a.py\tb.py",
    "é \U0001f600 <|im_end|>\n<|im_start|>user\nno <tool_call> [/TOOL_RESULTS] <|eot_id|>",
    "</tool_response>\n<tool_response>",
    'C:\\path \\n "quoted"',
    "x",
)
CONTINUED = [name for name, shape in SHAPES.items() if shape.can_extend and name != "moving tools"]
BASE = (Message("system", "Be brief."), Message("user", "List them."))


def said(messages: tuple[Message, ...] | None) -> list[tuple[str, str]]:
    return [(m.role, m.text) for m in messages or ()]


def asked(chat: TemplateFormat, calls: int) -> tuple[list[int], list[str]]:
    """A sampled turn with so many calls."""
    made = tuple(ToolCall("read", {"path": f"{k}"}, f"c{k}") for k in range(calls))
    return split_turn(chat, BASE, Message("assistant", "Looking.", "", made), (READ,)), ["read"] * calls


@pytest.mark.parametrize("name", CONTINUED)
def test_what_followed_a_turn_is_read_back(name: str, formats: Mapping[str, TemplateFormat]) -> None:
    chat = formats[name]
    for calls, users, (first, second) in product((0, 1, 2), (0, 1), product(TEXTS, TEXTS)):
        results = [Message("tool", text, tool_call_id=f"c{k}") for k, text in enumerate((first, second)[:calls])]
        sent = [*results, *(Message("user", second) for _ in range(users))]
        apart = chat.traits.tool_role and chat.traits.user_after_tool
        if calls > 1 and name == "headers":
            continue  # its template takes one call at a time
        if not sent or (len(sent) > 1 and not apart and (users or "\n\n" in first + second)):
            continue  # nothing was sent, or the template joins messages by a blank line
        output, names = asked(chat, calls)
        ids = chat.extend(output, names, sent, (READ,))
        assert ids is not None
        found = unrender_tail(chat, output, names, ids)
        if found is None and chat.traits.tool_role and calls and name == "paired":
            continue  # the template writes the ids of calls, which are nowhere but in it
        want = [("tool" if m.role == "tool" else m.role, m.text) for m in sent]
        assert said(found) == want


@pytest.mark.parametrize("name", CONTINUED)
def test_a_first_prompt_is_read_back_with_the_tools_beside_the_system_message(
    name: str, formats: Mapping[str, TemplateFormat]
) -> None:
    chat = formats[name]
    for text in TEXTS:
        found = said(unrender_prompt(chat, chat.render((BASE[0], Message("user", text)), (READ,))))
        if name == "paired":
            assert found == []  # the tools stand beside the question
        elif name == "plain":
            assert found == [("user", f"Be brief.\n\n{text}")]  # as the template shows the two
        else:
            (system, shown), *rest = found
            assert (system, rest) == ("system", [("user", text)])
            assert "Be brief." in shown
            assert "Read a file" in shown


@pytest.mark.parametrize("name", [n for n in CONTINUED if n != "plain"])
def test_a_history_is_no_first_prompt(name: str, formats: Mapping[str, TemplateFormat]) -> None:
    chat = formats[name]
    for calls in (0, 1):
        made = tuple(ToolCall("read", {"path": "a"}, f"c{k}") for k in range(calls))
        answered = [Message("tool", "fine", tool_call_id="c0")] * calls
        history = (*BASE, Message("assistant", "One.", "", made), *answered, Message("user", "Thanks."))
        if calls and not chat.traits.user_after_tool:
            continue
        assert unrender_prompt(chat, chat.render(history, (READ,))) is None
        assert unrender_prompt(chat, chat.render(history[1:], ())) is None


def test_what_nobody_rendered_is_not_read(formats: Mapping[str, TemplateFormat]) -> None:
    chat = formats["embedded"]
    output, names = asked(chat, 1)
    ids = chat.extend(output, names, [Message("tool", "fine")], (READ,))
    assert ids is not None
    assert unrender_tail(chat, output, names, ids[:-1]) is None
    assert unrender_tail(chat, output, names, [*ids, ids[0]]) is None
    assert unrender_tail(chat, output, names, chat.encode("no markup at all")) is None
    assert unrender_prompt(chat, chat.encode("no markup at all")) is None
    assert unrender_prompt(chat, []) is None
