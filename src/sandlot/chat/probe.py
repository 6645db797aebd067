"""What a chat template can do, found out at load by rendering probe conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.native_ids import with_native_ids
from sandlot.chat.roles import Traits, with_arguments_as_text
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
    refused: list[str] = []

    def shows(messages: Sequence[Message], tools: Sequence[Tool] = (), *, wanted: Sequence[str] = ()) -> bool:
        """Whether what is wanted stands in the text, in this order: some templates move later system messages up."""
        try:
            text, at = render(messages, tools), 0
        except TemplateError as e:
            refused.append(str(e))
            return False
        return all((at := text.find(part, at)) >= 0 for part in wanted or [m.text for m in messages])

    plain = [_user("First question."), _answer("First answer."), _user("Second question.")]
    if not shows(plain):
        raise ModelError(
            f"the chat template of {name} does not render a plain conversation of user and assistant{_why(refused)}; "
            f"write one that does into its chat_template.jinja"
        )
    asked = [_user("First question."), _answer("", _READ)]
    result = _result("First result.", _READ)

    def calls_shown(asked: Sequence[Message]) -> bool:
        # Some templates hold back an assistant message that is the last one.
        return any(shows(messages, TOOLS, wanted=["0.py"]) for messages in ([*asked, result], asked))

    refused.clear()
    calls, as_text = calls_shown(asked), False
    if not calls and calls_shown(written := [asked[0], with_arguments_as_text(asked[1])]):
        calls, as_text, asked = True, True, written
    refused_calls = _why(refused)
    refused.clear()
    tools = shows(plain, TOOLS, wanted=[_READ])
    refused_tools = _why(refused)
    told = [*asked, result]
    system_first = shows([_system("First rule."), *plain])
    head = [_system("First rule.")] if system_first else []
    tool_role = shows(told, TOOLS, wanted=["First result."])
    calls_of_both = (*_answer("", _READ).tool_calls, ToolCall(_LIST, {"path": "1.py"}, "probe-0-1"))
    both = [plain[0], Message("assistant", tool_calls=calls_of_both), result, _result("Second result.", _LIST, 1)]
    both[1] = with_arguments_as_text(both[1]) if as_text else both[1]
    traits = Traits(
        system_first=system_first,
        system_later=shows([*head, *plain[:2], _system("Later rule."), plain[2]]),
        user_after_user=shows([*head, *plain, _user("Third question.")]),
        empty_answer=shows([*head, plain[0], _answer(""), plain[2]]),
        tool_role=tool_role,
        user_after_tool=shows([*told, _user("Third question.")], TOOLS, wanted=["First result.", "Third question."]),
        calls=calls,
        calls_together=not (calls and tool_role)
        or shows(both, TOOLS, wanted=["1.py", "First result.", "Second result."]),
        arguments_as_text=as_text,
        tools=tools,
        native_ids=native_ids,
        switches=_switches(render),
    )
    if traits.switches:
        log.warning(
            "%s: its chat template reads switches such as /no_think out of texts; here they stay text, since files and "
            "paths hold them, too: set the template's variable for them, where it has one, in chat.variables",
            name,
        )
    for shown, what, why, unknown in (
        (traits.tools, "tools", refused_tools, "which the agent has"),
        (traits.calls, "tool calls", refused_calls, "which it has made"),
    ):
        if not shown:
            log.warning(
                "%s: its chat template shows the model no %s%s, so it cannot know %s; "
                "write a template that does into its chat_template.jinja",
                *(name, what, why, unknown),
            )
            break
    return traits


_SWITCHES = ("/think", "/no_think", "/nothink")


def _switches(render: Render) -> tuple[str, ...]:
    """The known switches, where a template changes what it writes elsewhere at one of them in a text."""

    def rest(system: str, user: str) -> str:
        told = [*([_system(system)] if system else []), _user(f"First question. {user}"), _answer("First answer.")]
        try:
            return render([*told, _user("Second question.")], ()).partition("First answer.")[2]
        except TemplateError:
            return ""

    without = rest("/word", ""), rest("", "/word")
    return _SWITCHES if any((rest(word, ""), rest("", word)) != without for word in _SWITCHES) else ()


def _why(refused: Sequence[str]) -> str:
    return f" ({refused[0]})" if refused else ""


def self_check(chat: TemplateFormat) -> None:
    """Set how and after which messages `chat` can be continued, and warn with the cost where that is not after all.

    Where only later system messages go wrong the format makes users' messages of them from then on.
    """
    taken = chat.traits
    ways = list(product((False, True), dict.fromkeys((taken.system_later, False)), (False, True)))
    found: list[tuple[tuple[bool, bool, bool], _Outcome]] = []

    def go(numbers: bool, later: bool, needs_tools: bool) -> None:
        chat.numbers_calls, chat.tail_needs_tools = numbers, needs_tools
        chat.traits = replace(taken, system_later=later)

    for way in ways:
        go(*way)
        found.append((way, outcome := _outcome(chat)))
        if not outcome.failed:
            chat.can_extend = True
            return
    partly = [(way, outcome) for way, outcome in found if outcome.only_results]
    go(*(partly or found)[0][0])
    chat.can_extend = bool(partly)
    chat.declines_at = frozenset(("user", "system")) if partly else frozenset()
    log.warning(
        "%s: its chat template cannot be continued %s (%s): %s is rendered and tokenized in full, and where that "
        "differs from what was sampled a turn starts a new branch, so that samples grow in number and repeat context",
        chat.name,
        "after a user's message" if partly else "turn by turn",
        (partly or found)[-1][1].failed[0],
        "such a request" if partly else "every request",
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


@dataclass(frozen=True)
class _Outcome:
    """What is wrong with the probes whose continuation is not the full render's, and whether all of these have more
    than results of calls in what is new, and others were proven."""

    failed: tuple[str, ...]
    only_results: bool


def _outcome(chat: TemplateFormat) -> _Outcome:
    failed: list[str] = []
    proven, right, wrong_results = 0, 0, 0
    for base in BASES:
        for what, turn, new in TURNS:
            tools = TOOLS if turn.tool_calls or len(base) != 2 else ()
            results = all(m.role == "tool" for m in new) and chat.traits.tool_role
            try:
                wrong = _difference(chat, base, turn, new, tools)
            except TemplateError:
                continue  # the template does not take such a conversation at all: there is nothing to be equal to
            if wrong:
                failed.append(f"{what}: {wrong}")
            right += results and not wrong
            wrong_results += results and bool(wrong)
            proven += not wrong
    if not failed and not proven:
        failed.append("it takes none of the probe conversations")
    return _Outcome(tuple(failed), right > 0 and not wrong_results)


def _difference(
    chat: TemplateFormat, base: tuple[Message, ...], turn: Message, new: tuple[Message, ...], tools: tuple[Tool, ...]
) -> str:
    if turn.tool_calls and chat.text_after_results:
        turn = replace(turn, text="")  # what was sampled stays where it was
    full = chat.render([*base, turn, *new], tools)
    names = [c.name for c in turn.tool_calls]
    unnamed = new if chat.traits.native_ids else [replace(m, tool_name="") for m in new]
    native = [c.id for m in with_native_ids([*base, turn]) for c in m.tool_calls][-len(names) :] if names else []
    sampled = chat.encode(" ".join(native)) if chat.traits.native_ids else []
    if chat.numbers_calls:
        before = sum(len(m.tool_calls) for m in base)
        sampled = chat.encode(f'{{"tool_call_id": "{before}", "tool_name"')
    try:
        tails = [chat.extend([*sampled, stop], names, unnamed, tools) for stop in chat.stop_token_ids]
        cut = chat.extend(sampled, names, new, tools)
    except TemplateError as e:
        return str(e)
    tail = min((tail for tail in tails if tail is not None), key=len, default=None)
    if tail is None or cut is None:
        return "it declines to be continued"
    if full[len(full) - len(tail) :] != tail or cut[1:] != tail:
        return "what follows the turn differs"
    if cut[0] not in chat.stop_token_ids or full[len(full) - len(cut)] != cut[0]:
        return "the turn is closed in another way"
    prompt, whole = chat.text(base, tools), chat.text([*base, turn, *new], tools)
    kept = _kept_of(prompt, whole, base[-1].text)
    if kept < 0:  # earlier thoughts may be left out: whether they are is the policy's to say
        prompt, whole = (chat.without_thoughts(text) for text in (prompt, whole))
        kept = _kept_of(prompt, whole, base[-1].text)
    if kept < 0:
        return "earlier turns are rewritten"
    if not any(part and part in whole[kept:] for part in (turn.text, *names)):
        return "the turn itself is not where it should be"
    return ""


def _kept_of(prompt: str, whole: str, last: str) -> int:
    """Where the last message of a prompt ends, when the next prompt begins with all up to there; else -1."""
    line = last.split("\n")[0]
    end = prompt.rfind(line) + len(line)
    return end if whole.startswith(prompt[:end]) else -1
