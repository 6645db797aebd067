"""What is proven of a family's format at load: it is like the template, safe against spelled tokens, extendable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from sandlot.chat.families import FamilyFormat
from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.probe import BASES, TOOLS, TURNS
from sandlot.chat.template import TemplateError
from sandlot.chat.template_format import TemplateFormat

Conversation = tuple[tuple[Message, ...], tuple[Tool, ...]]


def difference(chat: FamilyFormat, own: TemplateFormat) -> str:
    """The first probe conversation that the checkpoint's own template writes in another way; empty where none is."""
    compared = 0
    for messages, tools in _conversations():
        try:
            wanted = own.render(messages, tools)
            found = chat.render(messages, tools)
        except TemplateError:
            continue
        if wanted != found:
            at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), 0)
            here, there = (own.decode(ids[at : at + 12]) for ids in (wanted, found))
            return f"the template goes on with {here!r} where the family has {there!r}"
        compared += 1
    return "" if compared else "there is no conversation that both take"


def spoof(chat: FamilyFormat) -> str:
    """Where a control string in untrusted text became the control token; empty where it never did."""
    hostile = "\n".join(chat.tokenizer.control_ids)
    for text in ("harmless", hostile):
        messages = [
            Message("system", f"Rules. {text}"),
            Message("user", f"Look. {text}"),
            Message("assistant", f"I look. {text}", tool_calls=(ToolCall("probe_read", {"path": text}, "probe-0-0"),)),
            Message("tool", f"Found. {text}", tool_call_id="probe-0-0", tool_name="probe_read"),
        ]
        try:
            ids = chat.render(messages, (Tool("probe_read", text, TOOLS[0].parameters), *TOOLS[1:]))
        except TemplateError as e:
            return str(e)
        counted = {i: ids.count(i) for i in chat.tokenizer.control_ids.values()}
        if text == "harmless":
            expected = counted
        elif wrong := [s for s, i in chat.tokenizer.control_ids.items() if counted[i] != expected[i]]:
            return f"the string {wrong[0]!r} in a message becomes a control token"
    return ""


@dataclass(frozen=True)
class Continuation:
    """How a family goes on from the probe turns: what is wrong with the first that is not continued as a full render
    has it (empty where none is), and which turns it declines to continue, which is never wrong."""

    wrong: str
    declined: tuple[str, ...]


def continuation(chat: FamilyFormat) -> Continuation:
    """Continue every probe turn and compare with full renders.

    Where only later system messages go wrong the format makes users' messages of them from then on.
    """
    found = _continuation(chat)
    if found.wrong and "system" in found.wrong and chat.traits.system_later:
        chat.traits = replace(chat.traits, system_later=False)
        found = _continuation(chat)
    return found


def _continuation(chat: FamilyFormat) -> Continuation:
    proven, declined = 0, dict[str, None]()
    for base, (what, turn, new) in product(BASES, TURNS):
        tools = TOOLS if turn.tool_calls or len(base) != 2 else ()
        try:
            wrong = _wrong(chat, base, turn, new, tools)
            if wrong and turn.text and turn.tool_calls:
                # Some families show the text of such a turn behind its results. What was sampled stays where it was.
                wrong = _wrong(chat, base, replace(turn, text=""), new, tools)
        except TemplateError:
            continue
        if wrong is None:
            declined[what] = None
        elif wrong:
            return Continuation(f"{what}: {wrong}", tuple(declined))
        else:
            proven += 1
    return Continuation("" if proven else "it continues none of the probe turns", tuple(declined))


def _wrong(
    chat: FamilyFormat, base: Sequence[Message], turn: Message, new: Sequence[Message], tools: Sequence[Tool]
) -> str | None:
    """What is wrong with the continuation of one turn; None where it is declined."""
    head, full = chat.render(base, tools), chat.render([*base, turn, *new], tools)
    names = [c.name for c in turn.tool_calls]
    output = list(full[len(head) :]) if full[: len(head)] == head else chat.stand_ins[-1]
    end = next((i for i, token in enumerate(output) if token in chat.stop_token_ids), len(output))
    output = output[:end]
    cut = chat.extend(output, names, new, tools)
    tails = {stop: chat.extend([*output, stop], names, new, tools) for stop in chat.stop_token_ids}
    if all(tail is None for tail in tails.values()):
        return None
    for stop, tail in tails.items():
        if tail is not None and full[len(full) - len(tail) - 1 :] == [stop, *tail]:
            same = cut is None or cut[len(cut) - len(tail) :] == tail
            return "" if same else "a turn without its close is continued in another way"
    closing = chat.tokenizer.control_ids.get(chat.family.closing)
    if any(tail is not None and full[len(full) - len(tail) - 1 :] == [closing, *tail] for tail in tails.values()):
        return ""
    # Some families close a turn by the opening of the next one, which need not be a token that the model samples.
    if cut and cut[0] in chat.stop_token_ids and full[len(full) - len(cut) + 1 :] == cut[1:]:
        return ""
    return "what follows the turn differs"


def _conversations() -> Iterator[Conversation]:
    for base, (_, turn, new) in product(BASES, TURNS):
        tools = TOOLS if turn.tool_calls or len(base) != 2 else ()
        yield base, tools
        yield (*base, turn, *new), tools
        yield (*base, Message("assistant", turn.text, "A probe's thought.", turn.tool_calls), *new), tools
