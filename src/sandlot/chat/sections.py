"""What several forms share: JSON arguments between markers, and calls inside a section that has markers of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandlot.chat.json_calls import object_end, parse_object
from sandlot.chat.markup import Found, Reading, found, skip_blanks
from sandlot.chat.messages import CallStatus

_FENCE = "```"


@dataclass(frozen=True)
class Arguments:
    """Arguments read from text: their raw text ends at `stop`, the call at `end`."""

    value: dict[str, Any] | str
    status: CallStatus
    stop: int
    end: int
    ambiguous: bool = False


def read_arguments(
    text: str, at: int, close: str, following: str, reading: Reading, *, fenced: bool = False
) -> Arguments:
    """Read a JSON object at `at` that `close` ends, or nothing where `close` is empty.

    `following` opens the next call: an object before it is whole although its own close is missing. `fenced`: the
    object may stand in a code block, of which the opening fence is behind. Markers in its strings are data.
    """
    start = skip_blanks(text, at)
    if close and text.startswith(close, start):
        return Arguments({}, "ok", at, start + len(close))
    end, cut = object_end(text, start, reading.truncated)
    if end < 0:
        return _broken(text, at, len(text) if cut else start, close, following, reading)
    after = skip_blanks(text, end)
    if fenced and text.startswith(_FENCE, after):
        after = skip_blanks(text, after + len(_FENCE))
    if not close:
        after = end
    elif not text.startswith((close, following), after):
        return _broken(text, at, end, close, following, reading)
    done = after + len(close) if text.startswith(close, after) else after
    source = reading.reveal(text[start:end])
    value = parse_object(source)
    if value is None:
        return Arguments(source, "invalid_arguments", after, done)
    return Arguments(value, "ok", after, done)


def _broken(text: str, at: int, after: int, close: str, following: str, reading: Reading) -> Arguments:
    """Arguments that are no whole object: they go to their close marker before the next call, else to the end."""
    limit = text.find(following, after)
    limit = len(text) if limit < 0 else limit
    stop = text.rfind(close, after, limit) if close else limit
    closed = stop >= 0 and (bool(close) or limit < len(text) or not reading.truncated)
    if not closed and limit < len(text):
        stop, closed, close = limit, True, ""
    if not closed or after == len(text):
        return Arguments(reading.reveal(text[at:]), "unclosed", len(text), len(text))
    ambiguous = bool(close) and text.find(close, after) != stop
    source = reading.reveal(text[at:stop]).strip().removesuffix(_FENCE).rstrip()
    return Arguments(source, "invalid_arguments", stop, stop + len(close), ambiguous)


class Sections:
    """Finds calls that begin with `call_open`, the first of a run after a section's own marker, where it has one.

    `read_body` reads a call from behind its marker. `alone`: a call may also stand outside a section.
    """

    def __init__(
        self,
        section_open: str,
        section_close: str,
        call_open: str,
        read_body: Callable[[str, int, int], Found],
        *,
        alone: bool = True,
    ) -> None:
        self.section_open, self.section_close, self.call_open = section_open, section_close, call_open
        self.read_body, self.alone = read_body, alone

    def next_call(self, text: str, at: int) -> int:
        """Where the next call begins, its section's marker included."""
        section = text.find(self.section_open, at)
        call = text.find(self.call_open, at)
        if call >= 0 and not self.alone and not (at and skip_blanks(text, at) == call):
            call = -1
        if section >= 0 and (call < 0 or section < call):
            return section
        return call

    def read(self, text: str, at: int) -> list[Found]:
        """The call that begins at `at`; the section ends with it when the section's close marker is next."""
        start = at
        if text.startswith(self.section_open, at):
            start = skip_blanks(text, at + len(self.section_open))
        if text.startswith(self.call_open, start):
            read = self.read_body(text, start, start + len(self.call_open))
        else:
            read = self._read_shapeless(text, at + len(self.section_open))
        after = skip_blanks(text, read.end)
        if text.startswith(self.section_close, after):
            read = Found(after + len(self.section_close), read.call, read.ambiguous, read.shown)
        return [read]

    def _read_shapeless(self, text: str, body: int) -> Found:
        """A section that begins with no call."""
        ends = [i for m in (self.section_close, self.section_open) if (i := text.find(m, body)) >= 0]
        raw_end = min(ends, default=len(text))
        raw = text[body:raw_end]
        return found(raw_end, "", raw, raw, "missing_name" if ends else "unclosed")
