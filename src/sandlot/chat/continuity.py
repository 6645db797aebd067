"""Which turn of a session a request continues, decided before the engine is asked.

Every request is walked once from its first message. A running key stands for the history so far: it starts from the
offered tools, a foreign message folds its digest into it, and one of the session's own turns folds in that turn's
id. A turn is found again by what the gateway minted (tool-call ids, signatures) or, where the wire carries
nothing back, by its text among the turns that were sampled under exactly this key. So every open branch (the
agent, its sub-agents, side calls, a compacted history) finds its own turn, whatever order they come in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import is_

from sandlot.chat.messages import CallStatus, Message, Tool, ToolCall, canonical_json, digest, tools_digest


@dataclass(frozen=True)
class Match:
    """How a request relates to the session.

    `turn` is the last own turn in its history (None: there is none), `new` the messages after that turn. `key` stands
    for the whole request: equal keys are the same question under the same history. `fork` says why the request is no
    plain continuation, with the first difference; it is empty for the first request of a session. `path` are the keys
    before and after each of `messages`, `edits` what is wrong with those that have a mark of ours.
    """

    turn: str | None
    new: tuple[Message, ...]
    key: bytes
    fork: str = ""
    messages: tuple[Message, ...] = ()
    path: tuple[bytes, ...] = ()
    edits: Mapping[int, str] = field(default_factory=dict)


_EXCERPT, _BEFORE = 80, 20
"""Characters that a fork's reason quotes, and how many of them stand before the difference where that comes late."""
_BLANKS = 10_000
"""Characters by which a text may differ from what was told and still be the same but for blanks."""
_WALKS = 4
"""How many of the last requests are remembered to begin from."""


@dataclass
class _Own:
    """A recorded turn: the key it was sampled under, the key after it, and what the agent was told.

    `form` are its calls as they first came back under their ids: a client may run what a model wrote in a form of its
    own (a default filled in, a blank left out, an old name of an argument replaced), and then keeps to it. `echo` is
    the last message that was found to be this turn: histories come again and again.
    """

    id: str
    key: bytes
    after: bytes
    told: Message
    statuses: tuple[CallStatus, ...]
    form: tuple[ToolCall, ...] | None = None
    echo: Message | None = None

    def edited(self, message: Message, *, marked: bool) -> str | None:
        """What of the turn the client changed in meaning, or None. Whitespace, key order and lost reasoning are no
        change, nor is the first form in which the calls of a message come back that is `marked` as this turn."""
        if message is self.echo or message is self.told:
            return None
        if abs(len(message.text) - len(self.told.text)) > _BLANKS or message.text.split() != self.told.text.split():
            return "edited text"
        if len(message.tool_calls) != len(self.told.tool_calls):
            return "added or removed calls"
        told, form = self.told.tool_calls, self.told.tool_calls
        if marked:
            form = message.tool_calls if self.form is None else self.form
        for sent, came, formed, status in zip(told, message.tool_calls, form, self.statuses, strict=True):
            if status != "ok":
                continue  # clients rewrite calls they could not run in ways of their own
            if sent.name != came.name:
                return "renamed call"
            own_form = came.id in ("", sent.id) and _same_arguments(formed, came)
            if not own_form and not _same_arguments(sent, came):
                return "edited arguments"
        if marked and self.form is None:
            self.form = form
        self.echo = message
        return None


@dataclass(eq=False)
class _Walk:
    """A request's way from its first message: the key and the last own turn before and after each message.

    The first `steady` messages mean the same whenever they come. An assistant message without a mark that is no turn
    yet may become one when a call in flight is recorded; one that was edited is told of again.
    """

    messages: list[Message]
    path: list[bytes]
    found: list[tuple[str, int] | None]
    steady: int

    @property
    def length(self) -> int:
        return len(self.messages)

    def go(self, message: Message, key: bytes, found: tuple[str, int] | None = None, *, steady: bool = True) -> None:
        """Take one message."""
        if steady and self.steady == len(self.messages):
            self.steady += 1
        self.messages.append(message)
        self.path.append(key)
        self.found.append(found or self.found[-1])

    def same_as(self, messages: Sequence[Message]) -> int:
        """How many of the first messages are the very same objects, as far as they are steady.

        The head of a conversation may be made anew with each request.
        """
        same = list(map(is_, self.messages, messages))
        if same and not same[0] and messages[0].role == "system":
            same[0] = messages[0] == self.messages[0]
        return min(self.steady, same.index(False) if False in same else len(same))

    def cut(self, length: int) -> _Walk:
        """Its beginning."""
        end = length + 1
        return _Walk(self.messages[:length], self.path[:end], self.found[:end], length)


@dataclass
class Continuity:
    """The open branches of one session. Not thread-safe: the gateway calls it on its event loop."""

    _own: dict[str, _Own] = field(default_factory=dict)
    _marks: dict[str, str] = field(default_factory=dict)
    _under: dict[bytes, list[str]] = field(default_factory=dict)
    _echoes: dict[bytes, _Own] = field(default_factory=dict)
    _known: set[bytes] = field(default_factory=set)
    _next: dict[bytes, Message] = field(default_factory=dict)
    _continued: set[str] = field(default_factory=set)
    _walks: list[_Walk] = field(default_factory=list)

    def match(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> Match:
        """Find the turn that `messages` continue. Linear in the request; changes no answer."""
        walk = self._begun(messages, digest("tools", tools_digest(tools)))
        edits: dict[int, str] = {}
        for i in range(walk.length, len(messages)):
            message, key = messages[i], walk.path[-1]
            if message.role != "assistant":
                walk.go(message, blake2b(key + message.digest, digest_size=16).digest())
            elif own := self._find(message, key, i, edits):
                walk.go(message, own.after, (own.id, i))
            else:
                steady = not edits and any(mark in self._marks for mark in message.marks)
                walk.go(message, blake2b(key + message.digest, digest_size=16).digest(), steady=steady)
        self._walks = [walk, *self._walks[: _WALKS - 1]]
        path = walk.path
        turn, at = walk.found[-1] or (None, -1)
        new = tuple(messages[at + 1 :])
        if turn is not None:
            new = _answering(self._own[turn].told, new)
        found = Match(turn, new, path[-1], "", tuple(messages), tuple(path), edits)
        return replace(found, fork=self.fork(found))

    def fork(self, match: Match) -> str:
        """Why the request is no plain continuation of what is recorded by now; see `Match`."""
        if not self._own or (match.turn is not None and match.turn not in self._continued):
            return ""
        if match.path[0] not in self._known:
            return "other tools are offered"
        at = next((i for i, key in enumerate(match.path[1:]) if key not in self._known), None)
        if at is None:
            return "the same history again"
        if at in match.edits:
            return match.edits[at]
        message = match.messages[at]
        return f"message {at} ({message.role}) differs: {_excerpt(message, self._next.get(match.path[at]))!r}"

    def record(self, match: Match, turn_id: str, told: Message, statuses: Sequence[CallStatus] = ()) -> None:
        """Remember a turn sampled for `match`. `told` is the assistant message as the agent was told it, with all marks
        of the turn; `statuses` are those of its calls, all well where there are none."""
        after = digest(match.key, "turn", turn_id)
        own = _Own(turn_id, match.key, after, told, tuple(statuses or ["ok"] * len(told.tool_calls)))
        self._own[turn_id] = own
        self._under.setdefault(match.key, []).append(turn_id)
        for mark in told.marks:
            self._marks[mark] = turn_id
        for i in range(len(match.path) - 1, -1, -1):
            if match.path[i] in self._known:
                break  # and with it all keys before it
            self._known.add(match.path[i])
            if i:
                self._next.setdefault(match.path[i - 1], match.messages[i - 1])
        self._known.add(own.after)
        if match.turn is not None:
            self._continued.add(match.turn)

    def sampled_under(self, key: bytes) -> Sequence[str]:
        """Turns sampled for exactly this request, oldest first."""
        return self._under.get(key, ())

    def continued(self, turn_id: str) -> bool:
        """Whether a later turn builds on this one: then the agent evidently received it."""
        return turn_id in self._continued

    def told(self, turn_id: str) -> Message:
        """The assistant message of a turn as the agent was told it."""
        return self._own[turn_id].told

    def _begun(self, messages: Sequence[Message], start: bytes) -> _Walk:
        """The walk of an earlier request as far as this one is the same, which is nearly always nearly all of it."""
        best, length = None, 0
        for walk in self._walks:
            if walk.path[0] == start and (same := walk.same_as(messages)) > length:
                best, length = walk, same
        if best is None:
            return _Walk([], [start], [None], 0)
        if length >= best.length - 2:
            self._walks.remove(best)  # a longer one takes its place
        return best.cut(length)

    def _find(self, message: Message, key: bytes, index: int, edits: dict[int, str]) -> _Own | None:
        marks = self._marks
        marked = {marks[mark] for mark in message.marks if mark in marks}
        if len(marked) > 1:
            edits[index] = f"message {index} joins pieces of {len(marked)} turns"
            return None
        if marked:
            own = self._own[marked.pop()]
            if own.key != key:
                return None  # the history before it was edited: `fork` names the first difference
            if difference := own.edited(message, marked=True):
                edits[index] = f"message {index}: {difference} of turn {own.id}"
                return None
            return own
        if key not in self._under:
            return None
        echo = digest(key, message.digest)
        if echo not in self._echoes:
            under = (self._own[turn_id] for turn_id in self._under[key])
            same = [own for own in under if own.edited(message, marked=False) is None]
            if not same:
                return None
            # Of several equal answers the one that has the very text. A request then means the same whenever it comes.
            self._echoes[echo] = next((own for own in same if own.told.text == message.text), same[0])
        return self._echoes[echo]


def _answering(told: Message, new: Sequence[Message]) -> tuple[Message, ...]:
    """What follows a turn, each result under the name that the policy called: some clients rename what they cannot
    run."""
    names = {call.id: call.name for call in told.tool_calls}
    return tuple(
        replace(message, tool_name=name)
        if (name := names.get(message.tool_call_id, message.tool_name)) != message.tool_name
        else message
        for message in new
    )


def _excerpt(message: Message, known: Message | None) -> str:
    """What a message says where it begins to differ from the known one in its place, with a few words before that."""
    text, other = _told(message), _told(known) if known else ""
    same, end = 0, min(len(text), len(other))
    while same < end:
        middle = (same + end + 1) // 2
        if text[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle - 1
    start = same - _BEFORE if same > _EXCERPT // 2 else 0
    return ("…" if start else "") + " ".join(text[start : start + 8 * _EXCERPT].split())[:_EXCERPT]


def _told(message: Message) -> str:
    calls = (f"{call.name} {canonical_json(call.arguments)}" for call in message.tool_calls)
    return "\n".join(filter(None, [message.text, *calls]))


def _same_arguments(one: ToolCall, other: ToolCall) -> bool:
    """Equal in meaning."""
    return one.arguments == other.arguments or canonical_json(one.arguments) == canonical_json(other.arguments)
