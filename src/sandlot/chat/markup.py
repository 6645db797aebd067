"""The strings a model marks thoughts and tool calls with, and what one reading of a call yields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sandlot.chat.messages import CallStatus, ParsedCall, Tool


class Pair(NamedTuple):
    """What opens and closes a thought; `sign` is what a template that has them holds, where not the opening itself."""

    opening: str
    closing: str
    sign: str = ""


THINK_PAIRS = (
    Pair("<think>", "</think>"),
    Pair("[THINK]", "[/THINK]"),
    Pair("<seed:think>", "</seed:think>"),
    Pair("<mm:think>", "</mm:think>"),
    Pair("<longcat_think>", "</longcat_think>"),
    Pair("<|START_THINKING|>", "<|END_THINKING|>"),
    Pair("<|channel>thought", "<channel|>", sign="<|channel>"),
    Pair("<|open|>think<|sep|>", "<|close|>think<|sep|>", sign="<|open|>"),
)
"""Known markers of thoughts; a format takes the first pair that its template or its vocabulary has."""

TEXT_MARKERS = (
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    *("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
"""What some models put around the text of an answer. It is no part of that, where it is control tokens."""

CALL_PAIRS = (
    ("<tool_call>", "</tool_call>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<longcat_tool_call>", "</longcat_tool_call>"),
)
"""Known markers of calls; a format takes the first pair that its vocabulary or its template has."""


@dataclass(frozen=True)
class Markup:
    """The markers in the form they have in decoded text: an alias where the vocabulary has a control token for it.

    A marker that is a control token is only recognised where that token was sampled. `calls_are_tokens` says so of
    the call markers. `xml` says that the template teaches calls as `<function=…>`, which may then stand alone.
    `padded` says that the values of this form stand between line breaks that are no part of them.
    `around_text` stand around visible text and are no part of it.
    `form` is the form calls are written in (see `sandlot.chat.forms`); `alias` turns a marker into the form it has in
    decoded text.
    """

    think_open: str
    think_close: str
    call_open: str
    call_close: str
    calls_are_tokens: bool
    xml: bool
    padded: bool = True
    around_text: tuple[str, ...] = ()
    form: str = "tagged"
    alias: Callable[[str], str] = str


@dataclass(frozen=True)
class Found:
    """One call read from text: it ends before `end`.

    `shown` says that the agent is to see the markup as text, since no call can be sent for it.
    """

    end: int
    call: ParsedCall
    ambiguous: bool = False
    shown: bool = False


@dataclass(frozen=True)
class Reading:
    """What a form needs to read one reply. `truncated`: the text was cut by the token limit."""

    markup: Markup
    tools: Mapping[str, Tool]
    reveal: Callable[[str], str]
    truncated: bool

    def mark(self, literal: str) -> str:
        """A marker in the form it has in the text."""
        return self.markup.alias(literal)


class Form(Protocol):
    """One way of writing tool calls, for one reply."""

    def next_call(self, text: str, at: int) -> int:
        """Where the next call begins at or after `at`, -1 when there is none.

        `at` is 0 or the end of the call before; so a form in which calls stand side by side knows what may follow.
        """
        ...

    def read(self, text: str, at: int) -> list[Found]:
        """The calls that begin there: one, or several where one marker opens a list. The last one's end ends all."""
        ...


def found(
    end: int,
    name: str,
    arguments: dict[str, object] | str,
    raw: str,
    status: CallStatus = "ok",
    *,
    ambiguous: bool = False,
) -> Found:
    """A `Found` from its parts; a call without a name is shown."""
    return Found(end, ParsedCall(name, arguments, raw, status), ambiguous, shown=status == "missing_name")


def skip_blanks(text: str, at: int) -> int:
    """The first position from `at` on that is not whitespace."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def broken_end(text: str, at: int, markup: Markup) -> tuple[int, bool]:
    """Where a call that cannot be read ends: (start of its close marker or -1, whether another could be meant).

    It ends before the next call begins: at the last close marker before that.
    """
    first = text.find(markup.call_close, at)
    if first < 0:
        return -1, False
    following = text.find(markup.call_open, first)
    last = text.rfind(markup.call_close, first, len(text) if following < 0 else following)
    return last, last != first
