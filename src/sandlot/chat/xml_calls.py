"""Tool calls in the Qwen3-coder form: `<function=NAME>` and `<parameter=NAME>` with raw values.

Values are not escaped, so a value may hold the markup itself, and models forget close tags. Of all readings the one
with the least damage is taken: a close tag that is missing costs a half, each tag that stays unmatched inside a value
or after the call costs one, a parameter the tool does not declare costs three quarters, a value that swallows what
could be a parameter a quarter. Where two readings cost the same, the one with more parameters, then with the last
close tag, is taken and the call is marked ambiguous.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from sandlot.chat.markup import Found, Markup, broken_end, found, skip_blanks
from sandlot.chat.messages import Tool
from sandlot.chat.schema import from_json, properties, typed

FUNCTION = "<function="
_BUDGET = 60_000
"""How many steps the search for the best reading may take before the best one found so far is called ambiguous."""

_OF_A_REPLY = 10 * _BUDGET
"""How many steps all searches in one reply may take; after them each call has only what reads an ordinary one."""

_AT_LEAST = 600

_HORIZON = 256
"""How many tags after a call are looked at for damage: enough for any quoted call, and long outputs stay linear."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag of the XML form, or a marker of a call, in a text."""

    kind: str
    """`function`, `parameter` or `call`."""
    opens: bool
    name: str
    start: int
    end: int
    placed: bool = True
    """Whether it stands where the form would put it, and not in the middle of a value's line."""
    string: str = ""
    """`true` or `false` where the tag says whether its value is a string, or else JSON."""


class Tags(list[Tag]):
    """All tags of a text, in order, and how many steps may still be taken in search of what they mean."""

    steps_left = _OF_A_REPLY


@dataclass(frozen=True)
class _Step:
    """A value that ends at `stop`; then the value of tag `then` begins, or (`then` < 0) the call ends at `end`.

    `cut`: the text ends in the value.
    """

    cost: float
    stop: int
    then: int = -1
    end: int = 0
    cut: bool = False


Reading = tuple[tuple[int, _Step], ...]


def read_xml_call(
    text: str,
    body: int,
    all_tags: Tags,
    markup: Markup,
    tools: Mapping[str, Tool],
    reveal: Callable[[str], str],
    *,
    truncated: bool,
    bare: bool = False,
    padded: bool = True,
) -> Found:
    """Read the call whose body starts at `body` with `<function=` after blanks. `all_tags` are those of `text`.

    `truncated`: the text was cut, so the last value may have no end; that reading wins against an equally good one.
    `bare`: no call marker opened it, so none has to close it. `padded`: the form puts a line break on either side of
    a value.
    """
    first = bisect_left(all_tags, body, key=lambda t: t.start)
    function = all_tags[first] if first < len(all_tags) else None
    if function is None or not function.opens or function.kind != "function":
        return _broken(text, body, "", markup, reveal, truncated)
    if function.start != skip_blanks(text, body):
        return _broken(text, body, "", markup, reveal, truncated)
    tool = tools.get(function.name)
    declared = properties(tool)
    search = _Search(text, all_tags, first, declared, bare, truncated)
    readings, exhausted = search.best()
    all_tags.steps_left -= search.allowed - search.steps_left
    if not readings:
        return _broken(text, body, function.name, markup, reveal, truncated)
    chosen = max(readings, key=lambda r: (r[-1][1].cut, len(r), r[-1][1].end))
    end = chosen[-1][1].end
    if chosen[-1][1].cut:
        return _unclosed(text, body, function.name, reveal)
    arguments: dict[str, object] = {}
    for tag_index, step in chosen[1:]:
        tag = all_tags[tag_index]
        value = reveal(text[tag.end : step.stop])
        value = _trimmed(value) if padded else value
        if tag.string:
            arguments[tag.name] = value if tag.string == "true" else from_json(value)
        else:
            arguments[tag.name] = typed(value, (declared or {}).get(tag.name), tool.parameters if tool else {})
    raw = reveal(text[body : _body_end(text, end, markup)])
    if not function.name:
        return found(end, "", raw, raw, "missing_name", ambiguous=exhausted or len(readings) > 1)
    return found(end, function.name, arguments, raw, ambiguous=exhausted or len(readings) > 1)


def _body_end(text: str, end: int, markup: Markup) -> int:
    return end - len(markup.call_close) if text.endswith(markup.call_close, 0, end) else end


def _trimmed(value: str) -> str:
    """A value without the one line break that the form puts on either side of it."""
    return value.removeprefix("\n").removesuffix("\n")


def _unclosed(text: str, body: int, name: str, reveal: Callable[[str], str]) -> Found:
    raw = reveal(text[body:])
    return found(len(text), name, raw, raw, "unclosed")


def _broken(text: str, body: int, name: str, markup: Markup, reveal: Callable[[str], str], truncated: bool) -> Found:
    close, ambiguous = broken_end(text, body, markup)
    end = close + len(markup.call_close)
    if close < 0 or (truncated and end == len(text)):
        return _unclosed(text, body, name, reveal)
    raw = reveal(text[body:close])
    if not name:
        return found(end, "", raw, raw, "missing_name", ambiguous=ambiguous)
    return found(end, name, raw.strip(), raw, "invalid_arguments", ambiguous=ambiguous)


def find_tags(text: str, markup: Markup) -> Tags:
    """All tags of the XML form in `text`, and the markers of calls, in order."""
    opening, closing = re.escape(markup.call_open), re.escape(markup.call_close)
    function, parameter = (re.escape(markup.alias(f"</{kind}>")) for kind in ("function", "parameter"))
    pattern = re.compile(rf"<(function|parameter)=([^<>\n]+)>|({function})|({parameter})|({opening})|({closing})")
    tags = Tags()
    for m in pattern.finditer(text):
        kind = m[1] or ("function" if m[3] else "parameter" if m[4] else "call")
        placed = m.start() > 0 and text[m.start() - 1] == "\n"
        tags.append(Tag(kind, bool(m[1] or m[5]), (m[2] or "").strip(), m.start(), m.end(), placed))
    return tags


class _Damage:
    """Counts tags that find no partner, one after the other."""

    def __init__(self) -> None:
        self.strays = 0
        self.open: list[str] = []

    def add(self, tag: Tag) -> None:
        if tag.opens:
            self.open.append(tag.kind)
        elif tag.kind in self.open:
            while self.open.pop() != tag.kind:
                self.strays += 1
        else:
            self.strays += 1

    @property
    def total(self) -> int:
        return self.strays + len(self.open)


class _Search:
    """Cheapest-first search over the readings of one call."""

    def __init__(
        self,
        text: str,
        tags: Tags,
        first: int,
        declared: Mapping[str, Any] | None,
        bare: bool,
        truncated: bool,
    ) -> None:
        self.text, self.tags, self.first = text, tags, first
        self.declared, self.bare, self.truncated = declared, bare, truncated
        self.steps_left = self.allowed = max(_AT_LEAST, min(_BUDGET, tags.steps_left))

    def best(self) -> tuple[list[Reading], bool]:
        """All readings of the lowest cost, and whether the search was given up before it was sure of them."""
        bound = self._greedy()
        order = count()
        heap: list[tuple[float, int, int, Reading]] = [(0.0, next(order), self.first, ())]
        done: list[Reading] = []
        while heap and self.steps_left > 0:
            cost, _, index, path = heapq.heappop(heap)
            if cost > bound:
                break
            if index < 0:
                bound = cost
                done.append(path)
                continue
            used = {self.tags[i].name for i, _ in path[1:]} | ({self.tags[index].name} if path else set())
            for step in self._steps(index, used, bound - cost):
                if cost + step.cost <= bound:
                    heapq.heappush(heap, (cost + step.cost, next(order), step.then, (*path, (index, step))))
        exhausted = self.steps_left <= 0
        if exhausted and not done and self._greedy_path:
            done = [self._greedy_path]
        return done, exhausted

    def _greedy(self) -> float:
        """The cost of the reading that ends every value as early as it can; a bound for the search."""
        cost, index, used, path = 0.0, self.first, set[str](), list[tuple[int, _Step]]()
        self._greedy_path: Reading = ()
        while index >= 0:
            step = next(self._steps(index, used, float("inf")), None)
            if step is None:
                return float("inf")
            cost += step.cost
            path.append((index, step))
            index = step.then
            used.add(self.tags[index].name)
        self._greedy_path = tuple(path)
        return cost

    def _steps(self, index: int, used: set[str], bound: float) -> Iterator[_Step]:
        """The ways in which the value of tag `index` can end, in the order of the text."""
        first = self.tags[index].kind == "function"
        inner, swallowed = _Damage(), 0.0
        for j in range(index + 1, len(self.tags)):
            self.steps_left -= 1
            if self.steps_left <= 0:
                return
            tag = self.tags[j]
            if first and not self._blank(self.tags[index].end, tag.start):
                return
            for step in self._ends(j, used, closes=not first):
                yield replace(step, cost=step.cost + inner.total + swallowed)
            if first:
                return
            if tag.kind == "parameter" and tag.opens and self._expected(tag, used):
                swallowed = 0.25
            inner.add(tag)
            if inner.strays > bound:
                return
        if self.truncated:
            yield _Step(inner.strays + swallowed, len(self.text), end=len(self.text), cut=True)

    def _ends(self, j: int, used: set[str], *, closes: bool) -> Iterator[_Step]:
        """What tag `j` can mean as the end of a value. `closes`: a close tag of the value is expected here."""
        tag, missing = self.tags[j], 0.5 if closes else 0.0
        if tag.kind == "parameter" and not tag.opens and closes:
            after = self._neighbour(j)
            if after is not None and after.kind == "parameter" and after.opens and after.name not in used:
                yield _Step(self._undeclared(after.name), tag.start, j + 1)
            else:
                yield from self._call_ends(j + 1, tag.start, 0.0, touching=after is not None)
        elif tag.kind == "parameter" and tag.opens and tag.name not in used:
            if not closes:
                yield _Step(self._undeclared(tag.name), tag.start, j)
            elif self._expected(tag, used):
                yield _Step(missing, tag.start, j)
        else:
            yield from self._call_ends(j, tag.start, missing, touching=True)

    def _call_ends(self, j: int, stop: int, cost: float, *, touching: bool) -> Iterator[_Step]:
        if not touching or j >= len(self.tags):
            return
        tag = self.tags[j]
        if self.bare and tag.opens and tag.kind == "function" and tag.placed:  # a forgotten close, and the next call
            yield self._finish(j - 1, stop, cost + 0.5, tag.start)
            return
        if tag.opens or tag.kind == "parameter":
            return
        if tag.kind == "call":
            yield self._finish(j, stop, cost if self.bare else cost + 0.5, tag.end)
            return
        after = self._neighbour(j)
        if after is not None and after.kind == "call" and not after.opens:
            yield self._finish(j + 1, stop, cost, after.end)
        elif self.bare or (after is not None and after.kind == "call"):
            yield self._finish(j, stop, cost if self.bare else cost + 0.5, tag.end)

    def _finish(self, j: int, stop: int, cost: float, end: int) -> _Step:
        rest, horizon = _Damage(), j + 1 + _HORIZON
        for tag in self.tags[j + 1 : horizon]:
            self.steps_left -= 1
            rest.add(tag)
        # What is open where the text was cut, or where the look ahead ends, is no damage.
        open_end = self.truncated or horizon < len(self.tags)
        return _Step(cost + (rest.strays if open_end else rest.total), stop, -1, end)

    def _undeclared(self, name: str) -> float:
        return 0.0 if self.declared is None or name in self.declared else 0.75

    def _neighbour(self, j: int) -> Tag | None:
        """The tag after `j` when only blanks part them."""
        after = self.tags[j + 1] if j + 1 < len(self.tags) else None
        return after if after is not None and self._blank(self.tags[j].end, after.start) else None

    def _blank(self, start: int, end: int) -> bool:
        return skip_blanks(self.text, start) >= end

    def _expected(self, tag: Tag, used: set[str]) -> bool:
        """Whether a parameter tag stands where one of the tool's own would, and was not given yet."""
        known = tag.name not in used and (self.declared is None or tag.name in self.declared)
        return known and tag.placed
