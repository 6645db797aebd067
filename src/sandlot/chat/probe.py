"""What a chat template can do, found out at load by rendering probe conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.native_ids import with_native_ids
from sandlot.chat.roles import Traits
from sandlot.chat.template import TemplateError
from sandlot.errors import ModelError

if TYPE_CHECKING:
    from sandlot.chat.template_format import TemplateFormat

log = logging.getLogger("sandlot.chat")

_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = (Tool("probe_read", "Read a file.", _SCHEMA), Tool("probe_list", "List files.", _SCHEMA))


def _system(text: str) -> Message:
    return Message("system", text)


def _user(text: str) -> Message:
    return Message("user", text)


def _answer(text: str, *names: str, turn: int = 0) -> Message:
    calls = tuple(ToolCall(name, {"path": f"{turn}.py"}, f"probe-{turn}-{k}") for k, name in enumerate(names))
    return Message("assistant", text, tool_calls=calls)


def _result(text: str, name: str, k: int = 0, turn: int = 0) -> Message:
    return Message("tool", text, tool_call_id=f"probe-{turn}-{k}", tool_name=name)


_READ, _LIST = "probe_read", "probe_list"


Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""The text of a conversation. Raises `TemplateError` where the template does not take it."""


def find_traits(name: str, render: Render, *, native_ids: bool = False) -> Traits:
    """Try what a template takes. `ModelError` when it does not even render a plain conversation."""

    def shows(messages: Sequence[Message], tools: Sequence[Tool] = (), *, wanted: Sequence[str] = ()) -> bool:
        """Whether what is wanted stands in the text, in this order: some templates move later system messages up."""
        try:
            text, at = render(messages, tools), 0
        except TemplateError:
            return False
        return all((at := text.find(part, at)) >= 0 for part in wanted or [m.text for m in messages])

    plain = [_user("First question."), _answer("First answer."), _user("Second question.")]
    if not shows(plain):
        raise ModelError(
            f"the chat template of {name} does not render a plain conversation of user and assistant; "
            f"write one that does into its chat_template.jinja"
        )
    asked = [_user("First question."), _answer("", _READ)]
    told = [*asked, _result("First result.", _READ)]
    system_first = shows([_system("First rule."), *plain])
    head = [_system("First rule.")] if system_first else []
    traits = Traits(
        system_first=system_first,
        system_later=shows([*head, *plain[:2], _system("Later rule."), plain[2]]),
        user_after_user=shows([*head, *plain, _user("Third question.")]),
        tool_role=shows(told, TOOLS, wanted=["First result."]),
        user_after_tool=shows([*told, _user("Third question.")], TOOLS, wanted=["First result.", "Third question."]),
        calls=shows(asked, TOOLS, wanted=["0.py"]),
        tools=shows(plain, TOOLS, wanted=[_READ]),
        native_ids=native_ids,
    )
    if not traits.tools or not traits.calls:
        log.warning(
            "%s: its chat template shows the model no %s, so it cannot know the agent's tools; "
            "write a template that does into its chat_template.jinja",
            name,
            "tools" if not traits.tools else "tool calls",
        )
    return traits


def self_check(chat: TemplateFormat) -> None:
    """Set `can_extend`, and warn with the cost where it is False."""
    chat.tail_needs_tools = False
    failed = _first_failure(chat)
    if failed:
        chat.tail_needs_tools = True
        failed = _first_failure(chat)
    chat.can_extend = not failed
    if failed:
        log.warning(
            "%s: its chat template cannot be continued turn by turn (%s): every request is rendered and tokenized in "
            "full, and where that differs from what was sampled a turn starts a new branch, so that samples grow in "
            "number and repeat context",
            chat.name,
            failed,
        )


BASES: tuple[tuple[Message, ...], ...] = (
    (_system("Rules."), _user("Fix the bug.")),
    (_user("Look."), _answer("I look.", _READ, turn=1), _result("x = 1\n" * 40, _READ, turn=1)),
    (_system("Rules."), _user("Fix it."), _answer("Fixed."), _user("Really?\n")),
)

TURNS: tuple[tuple[str, Message, tuple[Message, ...]], ...] = (
    ("user", _answer("Done."), (_user("Thanks."),)),
    ("user, user", _answer("Done."), (_user("Thanks."), _user("Bye."))),
    ("system in the middle", _answer("Done."), (_system("Be brief."), _user("Why?"))),
    ("tool", _answer("I read.", _READ), (_result("a", _READ),)),
    ("tool after a turn without text", _answer("", _READ), (_result("a", _READ),)),
    ("two tools", _answer("Both.", _READ, _LIST), (_result("a", _READ), _result("b", _LIST, 1))),
    ("two tools, user", _answer("", _READ, _LIST), (_result("a", _READ), _result("b", _LIST, 1), _user("Now?"))),
    ("tool, user", _answer("I read.", _READ), (_result("a", _READ), _user("And?"))),
    ("tool, system", _answer("I read.", _READ), (_result("a", _READ), _system("Be brief."))),
)


def _first_failure(chat: TemplateFormat) -> str:
    """What is wrong with the first probe whose continuation is not the full render's; empty when none is."""
    proven = 0
    for base in BASES:
        for what, turn, new in TURNS:
            tools = TOOLS if turn.tool_calls or len(base) != 2 else ()
            try:
                wrong = _difference(chat, base, turn, new, tools)
            except TemplateError:
                continue  # the template does not take such a conversation at all: there is nothing to be equal to
            if wrong:
                return f"{what}: {wrong}"
            proven += 1
    return "" if proven else "it takes none of the probe conversations"


def _difference(
    chat: TemplateFormat, base: tuple[Message, ...], turn: Message, new: tuple[Message, ...], tools: tuple[Tool, ...]
) -> str:
    full = chat.render([*base, turn, *new], tools)
    head = chat.tokenizer.encode(chat.text(base, tools, generation_prompt=False))
    names = [c.name for c in turn.tool_calls]
    unnamed = new if chat.traits.native_ids else [replace(m, tool_name="") for m in new]
    native = [c.id for m in with_native_ids([*base, turn]) for c in m.tool_calls][-len(names) :] if names else []
    sampled = chat.encode(" ".join(native)) if chat.traits.native_ids else []
    try:
        tail = chat.extend([*sampled, *chat.stop_token_ids[:1]], names, unnamed, tools)
        cut = chat.extend(sampled, names, new, tools)
    except TemplateError as e:
        return str(e)
    if tail is None or cut is None:
        return "it declines to be continued"
    if full[: len(head)] != head:
        return "earlier turns are rewritten"
    if full[len(full) - len(tail) :] != tail or cut[1:] != tail:
        return "what follows the turn differs"
    middle = chat.decode(full[len(head) : len(full) - len(tail)])
    if not any(part and part in middle for part in (turn.text, *names)):
        return "the turn itself is not where it should be"
    if cut[0] not in chat.stop_token_ids or full[len(full) - len(cut)] != cut[0]:
        return "the turn is closed in another way"
    return ""
