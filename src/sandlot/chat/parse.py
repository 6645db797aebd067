"""Takes apart what the model wrote: its thought, its text and its tool calls.

What is trimmed is what templates put between the parts, nothing else: line breaks around a thought; one line break
before and one after each call; a text of blanks only next to calls or after a thought. Two pieces of text around a
call are joined by a line break.

A call with a name that no tool has, or with arguments that are no object, is kept with its status: the agent answers
it with its own error, in training as in evaluation. Markup that names no tool stays in the text, so the agent sees it,
and is also recorded as a call of status `missing_name`. A call that was never closed is `unclosed`, is not in the text,
and makes the reply `truncated`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sandlot.chat.forms import form_of
from sandlot.chat.markup import Form, Markup, Reading, skip_blanks
from sandlot.chat.messages import ParsedCall, Reply, Tool


def parse_reply(
    text: str,
    *,
    thought_open: bool,
    markup: Markup,
    tools: Sequence[Tool],
    truncated: bool,
    reveal: Callable[[str], str] = str,
) -> Reply:
    """Read decoded text, in which control tokens are aliases, without its stop token.

    `thought_open`: the prompt has opened a thought and not closed it. `reveal` turns aliases into what they spell.
    """
    reading = Reading(markup, {t.name: t for t in tools}, reveal, truncated)
    form = form_of(reading)
    thought, rest, ambiguous = _split_thought(text, thought_open, markup, form, reveal)
    visible, calls, unsure = _read_calls(rest, reading, form)
    if thought and not visible.strip():
        visible = ""
    unclosed = any(c.status == "unclosed" for c in calls)
    return Reply(visible, reveal(thought), calls, truncated or unclosed, ambiguous or unsure)


def _split_thought(
    text: str, is_open: bool, markup: Markup, form: Form, reveal: Callable[[str], str]
) -> tuple[str, str, bool]:
    """(thought, what follows it, whether another split could be meant).

    A thought ends at its close marker. Without one it ends at the first call, and where there is none either it
    goes to the end. A close marker inside a call that the thought runs into belongs to that call.
    """
    start = skip_blanks(text, 0)
    if text.startswith(markup.think_open, start):
        text = text[start + len(markup.think_open) :]
    elif not is_open:
        # Some models close a thought that nobody opened, and so say that they have none.
        says_none = text.startswith(markup.think_close, start) and reveal(markup.think_close) != markup.think_close
        return "", text[start + len(markup.think_close) :].lstrip("\n") if says_none else text, False
    close, call = text.find(markup.think_close), form.next_call(text, 0)
    if close < 0:
        end = len(text) if call < 0 else call
        return text[:end].strip("\n"), text[end:], False
    while 0 <= call < close:
        last = form.read(text, call)[-1]
        if last.call.status == "unclosed":
            break
        if close < last.end:
            return text[:call].strip("\n"), text[call:], True
        call = form.next_call(text, last.end)
    rest = text[close + len(markup.think_close) :]
    return text[:close].strip("\n"), rest.lstrip("\n"), False


def _read_calls(text: str, reading: Reading, form: Form) -> tuple[str, tuple[ParsedCall, ...], bool]:
    """(visible text, calls, whether one of them was ambiguous)."""
    pieces: list[str] = []
    calls: list[ParsedCall] = []
    ambiguous, at, piece_start = False, form.next_call(text, 0), 0
    while at >= 0:
        found = form.read(text, at)
        calls += [_judged(read.call, reading) for read in found]
        ambiguous |= any(read.ambiguous for read in found)
        if not all(read.shown for read in found):
            pieces += [text[piece_start:at], *(read.call.raw for read in found if read.shown)]
            piece_start = found[-1].end
        at = form.next_call(text, found[-1].end)
    pieces.append(text[piece_start:])
    for mark in reading.markup.around_text:
        pieces = [piece.replace(mark, "") for piece in pieces]
    if len(pieces) > 1:
        pieces = [
            piece.removeprefix("\n" if k else "").removesuffix("\n" if k < len(pieces) - 1 else "")
            for k, piece in enumerate(pieces)
        ]
        pieces = [piece for piece in pieces if piece.strip()]
    return reading.reveal("\n".join(pieces)), tuple(calls), ambiguous


def _judged(call: ParsedCall, reading: Reading) -> ParsedCall:
    if call.status == "ok" and call.name not in reading.tools:
        return replace(call, status="unknown_tool")
    return call
