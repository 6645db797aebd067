"""What continuity remembers of earlier requests only makes it quick: without it every answer is the same."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sandlot.chat.continuity import Continuity, Match
from sandlot.chat.messages import Message, Tool, ToolCall
from support.profiles import few

TOOLS = (Tool("bash"),)


class World:
    """Conversations that interleave, fork and are rewritten, with calls in flight, seen by two that remember."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.quick, self.slow = Continuity(), Continuity()
        self.same: dict[str, Message] = {}
        self.histories = [[self.kept(Message("system", "s")), self.kept(Message("user", who))] for who in "ab"]
        self.in_flight: list[tuple[list[Message], Match]] = []
        self.turns = 0

    def kept(self, message: Message) -> Message:
        """The same object for the same message, as it is nearly always with equal bytes."""
        return message if self.chance(0.1) else self.same.setdefault(repr(message), message)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def step(self) -> None:
        history = self.rng.choice(self.histories)
        tools = () if self.chance(0.1) else TOOLS
        self.slow._walks.clear()
        match = self.quick.match(tuple(history), tools)
        assert match == self.slow.match(tuple(history), tools)
        self.in_flight.append((history, match))
        while self.in_flight and self.chance(0.7):
            self.answer(*self.in_flight.pop(self.rng.randrange(len(self.in_flight))))

    def answer(self, history: list[Message], match: Match) -> None:
        rng, turn = self.rng, f"t{self.turns}"
        self.turns += 1
        calls = tuple(ToolCall("bash", {"n": rng.choice([1, 2])}, f"{turn}_{i}") for i in range(rng.randrange(2)))
        marks = (*(call.id for call in calls), *([f"sig_{turn}"] if self.chance(0.5) else []))
        told = Message("assistant", rng.choice(["same", " same"]), tool_calls=calls, marks=marks)
        assert self.quick.fork(match) == self.slow.fork(match)
        self.quick.record(match, turn, told)
        self.slow.record(match, turn, told)
        results = [Message("tool", rng.choice("xy"), tool_call_id=call.id) for call in calls]
        longer = [*history, self.kept(self.echo(told)), *map(self.kept, [*results, Message("user", rng.choice("pq"))])]
        if self.chance(0.1):
            longer.insert(rng.randrange(1, len(longer)), self.kept(Message("assistant", "foreign")))
        if self.chance(0.2):  # an edit of what came before
            longer = [self.kept(self.echo(m)) if m.role == "assistant" and self.chance(0.2) else m for m in longer]
        self.histories.append(longer)
        if history in self.histories and self.chance(0.6):
            self.histories.remove(history)

    def echo(self, message: Message) -> Message:
        """An assistant's message as a client may send it back."""
        rng = self.rng
        text = rng.choice([message.text, message.text, f" {message.text.strip()}", "edited"])
        calls = [replace(c, arguments={"n": rng.choice([1, 9])}) if self.chance(0.2) else c for c in message.tool_calls]
        return replace(message, text=text, tool_calls=tuple(calls), marks=message.marks if self.chance(0.5) else ())


@few
@given(st.integers(0, 2**32))
def test_what_is_remembered_changes_no_answer(seed: int) -> None:
    world = World(seed)
    for _ in range(40):
        world.step()
