"""From the ids that were new in a prompt back to the messages they say, proven by rendering these again.

A guess at the roles is rendered with marks for its texts; what stands between the marks in any such prompt belongs to
the template, so what stands there in the real one are the texts. They count when rendering them gives the very ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product

from sandlot.chat.base import ChatFormat
from sandlot.chat.messages import Message, Role
from sandlot.errors import ModelError

_TRIES = 16
"""Ways to divide one text that are tried; there are several only where a text contains the template's markup."""

_SENT: tuple[Role, ...] = ("user", "system")
"""Who an agent speaks as; some agents give later instructions as system messages."""
_RESULT: tuple[Role, ...] = ("tool",)
_MOST_FIRST, _MOST_THEN = 4, 2
"""How many messages follow the system message of a first prompt, and the results of calls, at most."""

Render = Callable[[Sequence[Message]], Sequence[int] | None]


def unrender_tail(
    fmt: ChatFormat, last_output: Sequence[int], call_names: Sequence[str], new_ids: Sequence[int]
) -> tuple[Message, ...] | None:
    """What was sent after a sampled turn, as the model was shown it; None where that cannot be proven.

    `call_names` are the calls of that turn, `new_ids` what followed it in the next prompt.
    """

    def render(messages: Sequence[Message]) -> Sequence[int] | None:
        return fmt.extend(last_output, call_names, messages, ())

    results = _RESULT * len(call_names)
    then = [shape for count in range(_MOST_THEN + 1) for shape in product(_SENT, repeat=count)]
    for shape in filter(None, dict.fromkeys([*((*results, *rest) for rest in then), *then])):
        readings = _readings(fmt, render, shape, new_ids)
        if found := {messages for messages in readings if list(_ids(render, messages)) == list(new_ids)}:
            return found.pop() if len(found) == 1 else None
    return None


def unrender_prompt(fmt: ChatFormat, ids: Sequence[int]) -> tuple[Message, ...] | None:
    """The messages of a conversation's first prompt; None where they cannot be told apart.

    The system message is what the model was shown of it, with the tools that the template put beside it; what follows
    is proven.
    """

    def render(messages: Sequence[Message]) -> Sequence[int] | None:
        return fmt.render(messages, ())

    def proven(messages: Sequence[Message]) -> bool:
        if messages[0].role != "system":
            return list(_ids(render, messages)) == list(ids)
        # All but the system message, since the tools beside it are not known.
        again = list(_ids(render, (Message("system", _mark(0)), *messages[1:])))
        after = fmt.decode(again).partition(_mark(0))[2]
        return bool(after) and fmt.decode(_common_end(again, ids)).endswith(after)

    rest = [shape for count in range(1, _MOST_FIRST + 1) for shape in product(_SENT, repeat=count)]
    for shape in (("user",), *(("system", *shape) for shape in rest)):
        if found := {messages for messages in _readings(fmt, render, shape, ids) if proven(messages)}:
            return found.pop() if len(found) == 1 else None
    return None


def _readings(
    fmt: ChatFormat, render: Render, shape: Sequence[Role], ids: Sequence[int]
) -> Iterator[tuple[Message, ...]]:
    """The ways to read `ids` as messages of these roles, and of no others."""
    marks = [_mark(k) for k in range(len(shape))]
    rendered = _ids(render, [Message(role, mark) for role, mark in zip(shape, marks, strict=True)])
    shown = fmt.decode(rendered)
    controls = set(rendered) - set(fmt.encode(shown))
    if sum(token in controls for token in rendered) != sum(token in controls for token in ids):
        return  # texts hold no control tokens, so there are more or fewer messages
    between: list[str] = []
    for mark in marks:
        before, found, shown = shown.partition(mark)
        if not found:
            return
        between.append(before)
    text = fmt.decode(ids)
    if text.startswith(between[0]) and text.endswith(shown) and len(text) >= len(between[0]) + len(shown):
        inner = text[len(between[0]) : len(text) - len(shown)]
        for texts in islice(_divided(inner, between[1:]), _TRIES):
            yield tuple(Message(role, part) for role, part in zip(shape, texts, strict=True))
            if "\\" in inner:  # some templates write contents as JSON strings
                yield tuple(Message(role, _unescaped(part)) for role, part in zip(shape, texts, strict=True))


def _divided(text: str, separators: Sequence[str]) -> Iterator[tuple[str, ...]]:
    if not separators:
        yield (text,)
        return
    at = text.find(separators[0]) if separators[0] else -1
    while at >= 0:
        for rest in _divided(text[at + len(separators[0]) :], separators[1:]):
            yield (text[:at], *rest)
        at = text.find(separators[0], at + 1)


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _ids(render: Render, messages: Sequence[Message]) -> Sequence[int]:
    """The rendered ids; none where the template does not take such messages."""
    try:
        return render(messages) or ()
    except ModelError:
        return ()


def _common_end(a: Sequence[int], b: Sequence[int]) -> Sequence[int]:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return a[len(a) - count :]


def _mark(number: int) -> str:
    return f"text7f3a9c1e{number}here"
