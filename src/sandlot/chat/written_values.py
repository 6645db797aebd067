"""Values that are written almost as in JSON or Python, with strings between quotes of a model's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandlot.chat.markup import Found, Reading, found, skip_blanks

_DEEPEST = 100
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD = re.compile(r"[^\s,:\[\]{}()\U00100000-\U0010ffff]+")
_BARE_KEY = re.compile(r"[^,:\[\]{}\U00100000-\U0010ffff]+")
_BARE = re.compile(r"[^,\[\]{}\U00100000-\U0010ffff]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_AFTER = re.compile(r"\s*([,:\])}]|$)")
_ESCAPE = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(\n)|([nrtbfav0\\'"]))""")
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}


class Malformed(ValueError):
    """What stands here is no value."""


class Cut(Malformed):
    """The text ends where more of a value must come."""


class Values:
    """Reads values at a position that it moves on, none of which goes beyond `end`.

    `quotes` open and close strings. `escapes`: a backslash in a string is as in Python. `bare`: words are a string
    where they are no number. `improper` is set once a string held its own quote: its end was judged by what follows.
    """

    def __init__(
        self,
        text: str,
        at: int,
        end: int,
        quotes: Sequence[str],
        reveal: Callable[[str], str],
        *,
        escapes: bool = False,
        bare: bool = False,
    ) -> None:
        self.text, self.at, self.end = text, at, end
        self._quotes, self._reveal, self._escapes, self._bare = quotes, reveal, escapes, bare
        self.improper = False

    def take(self, *marks: str) -> str:
        """The one of `marks` that comes next after blanks, which is then behind; `Malformed` where none does."""
        self.at = skip_blanks(self.text, self.at)
        for mark in marks:
            if self.text.startswith(mark, self.at):
                self.at += len(mark)
                return mark
        raise self._wrong()

    def next_is(self, mark: str) -> bool:
        """Whether `mark` comes next after blanks."""
        return self.text.startswith(mark, skip_blanks(self.text, self.at))

    def word(self, pattern: re.Pattern[str] = _WORD) -> str:
        """A word after blanks."""
        self.at = skip_blanks(self.text, self.at)
        if not (m := pattern.match(self.text, self.at)):
            raise self._wrong()
        self.at = m.end()
        return m[0]

    def pairs(self, close: str, between: str, key: Callable[[], str], depth: int = 0) -> dict[str, Any]:
        """Keys and values up to `close`, which is then behind."""
        found: dict[str, Any] = {}
        while not self.next_is(close):
            name = key()
            self.take(between)
            if name in found:
                raise Malformed
            found[name] = self.value(depth + 1)
            if not self.next_is(close):
                self.take(",")
        self.take(close)
        return found

    def key(self) -> str:
        """The key of an object: a string, or a word."""
        quote = self._quote()
        return self._string(quote) if quote else self._reveal(self.word(_BARE_KEY if self._bare else _WORD).rstrip())

    def value(self, depth: int = 0) -> Any:
        """The value that comes next."""
        if depth > _DEEPEST:
            raise Malformed
        if quote := self._quote():
            return self._string(quote)
        if self.next_is("["):
            self.take("[")
            items = []
            while not self.next_is("]"):
                items.append(self.value(depth + 1))
                if not self.next_is("]"):
                    self.take(",")
            self.take("]")
            return items
        if self.next_is("{"):
            self.take("{")
            return self.pairs("}", ":", self.key, depth)
        word = self.word(_BARE if self._bare else _WORD).rstrip()
        if self.at == len(self.text):
            raise Cut
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if number := _NUMBER.fullmatch(word):
            return float(word) if number[1] or number[2] else int(word)
        if self._bare:
            return self._reveal(word)
        raise Malformed

    def _quote(self) -> str:
        self.at = skip_blanks(self.text, self.at)
        return next((q for q in self._quotes if self.text.startswith(q, self.at)), "")

    def _string(self, quote: str) -> str:
        start = end = self.at + len(quote)
        while True:
            end = self.text.find(quote, end, self.end)
            if end < 0:
                raise Cut if self.end == len(self.text) else Malformed
            if not self._escapes:
                break
            escaped = self._backslashes_before(end, start) % 2 == 1
            if not escaped and _AFTER.match(self.text, end + len(quote), self.end):
                break
            self.improper |= not escaped
            end += len(quote)
        self.at = end + len(quote)
        written = self._reveal(self.text[start:end])
        return _ESCAPE.sub(_meant, written) if self._escapes else written

    def _backslashes_before(self, end: int, start: int) -> int:
        at = end
        while at > start and self.text[at - 1] == "\\":
            at -= 1
        return end - at

    def _wrong(self) -> Malformed:
        return Cut() if skip_blanks(self.text, self.at) == len(self.text) else Malformed()


def end_of_values(text: str, body: int, marks: Mapping[str, str]) -> int:
    """Where values end at the latest: at the next mark that is a token. `marks` are these by what they spell."""
    ends = [i for literal, mark in marks.items() if mark != literal and (i := text.find(mark, body)) >= 0]
    return min(ends, default=len(text))


def broken_call(text: str, body: int, name: str, why: ValueError, close: str, open_: str, reading: Reading) -> Found:
    """A call that cannot be read: it goes to its close marker, else to the next call, else to the end of the text."""
    ends = [i for m in (close, open_) if (i := text.find(m, body)) >= 0]
    stop = min(ends, default=len(text))
    cut = isinstance(why, Cut)
    if (cut or not ends) and (reading.truncated or (cut and not ends)):
        raw = reading.reveal(text[body:])
        return found(len(text), name, raw, raw, "unclosed")
    raw = reading.reveal(text[body:stop])
    end = stop + len(close) if text.startswith(close, stop) else stop
    return found(end, name, raw.strip(), raw, "invalid_arguments" if name else "missing_name")


def _meant(escape: re.Match[str]) -> str:
    if code := escape[1] or escape[2]:
        return chr(int(code, 16))
    return "" if escape[3] else _PLAIN.get(escape[4], escape[4])
