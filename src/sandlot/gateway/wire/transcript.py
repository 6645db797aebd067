"""From the messages of a request to canonical ones: each is read once, then results find their calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.gateway.wire.base import Stored
from sandlot.gateway.wire.canon import invalid, join_text

T = TypeVar("T")


class Item(dict[str, Any]):
    """An element of a request's lists that came with the same bytes before; it keeps what was made of it.

    Its place in the list may differ from request to request, so what is made must not depend on that. Read-only.
    """

    __slots__ = ("made", "size", "weight")
    made: Any
    size: int
    """Of its JSON text, in bytes."""
    weight: int
    """Bytes that it takes besides that, about."""


class History(list[Any]):
    """A list of a request. The first `shared` elements are those of the history `before`, the very same objects."""

    __slots__ = ("before", "shared", "state")
    before: History | None
    shared: int
    state: _State

    def __init__(self, elements: Iterable[Any] = ()) -> None:
        super().__init__(elements)
        self.before = None
        self.shared = 0


class _Open(dict[int, ToolCall]):
    """Calls that have no result yet, by their place."""

    def __init__(self, calls: Iterable[tuple[int, ToolCall]] = ()) -> None:
        super().__init__(calls)
        self._lines: dict[tuple[str, str], deque[int]] = {}
        for place, call in self.items():
            for line in (("", ""), ("id", call.id), ("name", call.name)):
                self._lines.setdefault(line, deque()).append(place)

    def take(self, call_id: str, name: str) -> tuple[int, ToolCall] | None:
        """The first of this id or, where that is empty, of this name; an empty name is any."""
        line = self._lines.get(("id", call_id) if call_id else ("name", name) if name else ("", ""), deque())
        while line:
            place = line.popleft()
            if (call := self.pop(place, None)) is not None:
                return place, call
        return None


@dataclass(eq=False, slots=True)
class _State:
    """What a transcript has taken of a history after `count` of its elements."""

    count: int
    messages: list[Message]
    place: dict[str, tuple[int, ToolCall]]
    named: dict[str, tuple[int, ToolCall]]
    open: _Open
    calls: int
    found: list[Tool]


def made_of(item: Mapping[str, Any], where: str, make: Callable[[Mapping[str, Any], str], T]) -> T:
    """What `make` makes of an element, made once where the element is known; `where` is for errors only."""
    if not isinstance(item, Item):
        return make(item, where)
    try:
        made: T = item.made
    except AttributeError:
        made = item.made = make(item, where)
    return made


@dataclass(eq=False, slots=True)
class Result:
    """A tool result that has yet to find its call, by `call_id` or, where that is empty, by `name`.

    `place` within its message is for errors. `may_be_foreign`: an id of no known call counts as none. `found`: tools
    that a search gave.
    """

    place: str
    call_id: str
    text: str
    name: str = ""
    is_error: bool = False
    may_be_foreign: bool = False
    found: tuple[Tool, ...] = ()
    call: ToolCall | None = None
    message: Message | None = None

    def answering(self, call: ToolCall) -> Message:
        """The canonical message for the call; the same one for the same call."""
        if self.message is None or self.call is not call:
            self.call = call
            self.message = Message("tool", self.text, tool_call_id=call.id, tool_name=call.name, is_error=self.is_error)
        return self.message


@dataclass(eq=False, slots=True)
class Piece:
    """A part of an assistant's message, where a protocol sends thoughts, texts and calls as items of their own.

    A thought begins another message, and so does a text after one that was not followed by a call, and a piece of
    another `turn` of ours: clients keep what came of an answer that was cut, and put the next one behind it.
    """

    thought: str | None = None
    text: str | None = None
    call: ToolCall | None = None
    mark: str = ""
    turn: str = ""
    others: tuple[Piece, ...] = ()
    message: Message | None = None

    def follows(self, before: _Pieces) -> bool:
        """Whether it belongs to the message that the pieces before it make."""
        if self.turn and before.turn not in ("", self.turn):
            return False
        if self.text is None:
            return self.thought is None
        return before.called or not before.told

    def joined(self, others: tuple[Piece, ...]) -> Message:
        """The message that it makes with those after it; the same one for the same pieces."""
        if self.message is None or self.others != others:
            pieces = (self, *others)
            self.others = others
            self.message = Message(
                "assistant",
                join_text(p.text or "" for p in pieces),
                join_text(p.thought or "" for p in pieces),
                tuple(p.call for p in pieces if p.call),
                marks=tuple(p.mark for p in pieces if p.mark),
            )
        return self.message


class _Pieces(list[Piece]):
    """Those of one message: the turn that they name, whether they make a call and tell a text."""

    turn: str = ""
    called: bool = False
    told: bool = False

    def put(self, piece: Piece) -> None:
        self.append(piece)
        self.turn = self.turn or piece.turn
        self.called = self.called or piece.call is not None
        self.told = self.told or bool(piece.text)


@dataclass(frozen=True, slots=True)
class Found:
    """Tools that can be called from here on; the message before it tells the model of them."""

    tools: tuple[Tool, ...]


Step = Message | Result | Piece | Found


class Transcript:
    """Builds the canonical messages: pairs each tool result with its call and puts results into call order.

    Clients send the results of parallel calls in the order in which they ended; templates that show no ids would
    then let the model read the answers swapped. So each unbroken run of results is sorted by the place of its calls.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._run: list[tuple[int, Message]] = []
        self._place: dict[str, tuple[int, ToolCall]] = {}
        self._named: dict[str, tuple[int, ToolCall]] = {}
        self._open = _Open()
        self._count = 0
        self._pieces = _Pieces()
        self.found: list[Tool] = []
        """Tools that searches gave, as often as they gave them."""

    def take(self, items: Sequence[Any], field: str, read: Callable[[Any, str], Sequence[Step]]) -> None:
        """Append what `read` makes of each message in a field of the request, which has no other."""
        head, first = len(self._messages), 0
        if isinstance(items, History) and items.before is not None:
            state = getattr(items.before, "state", None)
            if state is not None and state.count <= items.shared:
                self._resume(state)
                first = state.count
            items.before = None
        taken = [made_of(items[i], f"{field}.{i}", read) for i in range(first, len(items))]
        start = _last_start(taken)
        for i, steps in enumerate(taken):
            if i == start and isinstance(items, History):
                self._settle()
                items.state = self._state(first + i, head)
            for step in steps:
                if isinstance(step, Message):
                    self.add(step)
                elif isinstance(step, Piece):
                    self._piece(step)
                elif isinstance(step, Found):
                    self.found += step.tools
                else:
                    self.result(f"{field}.{first + i}", step)

    def go_on(self, stored: Stored) -> None:
        """Begin with an earlier conversation."""
        for message in stored.messages:
            self.add(message)
        self.found += stored.found

    def _state(self, count: int, head: int) -> _State:
        place, named, calls = dict(self._place), dict(self._named), _Open(self._open.items())
        return _State(count, self._messages[head:], place, named, calls, self._count, list(self.found))

    def _resume(self, state: _State) -> None:
        self._messages += state.messages
        self._place, self._named, self._open = dict(state.place), dict(state.named), _Open(state.open.items())
        self._count, self.found = state.calls, list(state.found)

    def add(self, message: Message) -> None:
        """Append a message that is no tool result."""
        self._settle()
        self._messages.append(message)
        if message.role != "assistant":
            return
        made = tuple(enumerate(message.tool_calls, self._count))
        self._open = _Open(made)
        self._count += len(made)
        for entry in made:
            call = entry[1]
            self._named[call.name] = entry
            if call.id:
                self._place[call.id] = entry

    def result(self, where: str, result: Result) -> None:
        """Append the result of an earlier call."""
        if self._pieces:
            self._settle()
        place, call = self._pair(where, result)
        self._run.append((place, result.answering(call)))
        self.found += result.found

    def done(self) -> tuple[Message, ...]:
        """All messages."""
        self._settle()
        return tuple(self._messages)

    def _piece(self, piece: Piece) -> None:
        if self._run or not piece.follows(self._pieces):
            self._settle()
        self._pieces.put(piece)

    def _pair(self, where: str, result: Result) -> tuple[int, ToolCall]:
        call_id, name = result.call_id, result.name
        if result.may_be_foreign and call_id not in self._place:
            call_id = ""
        if (found := self._open.take(call_id, name)) is not None:
            return found
        if call_id in self._place:
            return self._place[call_id]
        where += result.place
        if call_id:
            raise invalid(
                where, f"this is the result of call {call_id!r:.80}, but no earlier assistant message makes it"
            )
        if name in self._named:  # the same result once more, as a client that resumes may send it
            return self._named[name]
        raise invalid(where, "a tool result must name its call by id")

    def _settle(self) -> None:
        """End what is open: a run of results, or the message that the last pieces make."""
        if self._run:
            self._run.sort(key=lambda entry: entry[0])
            self._messages.extend(message for _, message in self._run)
            self._run = []
        if self._pieces:
            first, *others = self._pieces
            self._pieces = _Pieces()
            self.add(first.joined(tuple(others)))


def _last_start(taken: Sequence[Sequence[Step]]) -> int:
    """The last element that goes on with nothing which those before it left open."""
    for i in range(len(taken) - 1, 0, -1):
        before, after = taken[i - 1][-1:], taken[i][:1]
        if before and after and (isinstance(after[0], Message) or type(after[0]) is not type(before[0])):
            return i
    return 0
