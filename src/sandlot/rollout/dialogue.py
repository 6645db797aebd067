"""An episode as it was spoken: what the agent sent at each turn and what the model answered, from ids alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sandlot.chat.base import ChatFormat
from sandlot.chat.messages import Message, ParsedCall, Reply
from sandlot.chat.unrender import unrender_prompt, unrender_tail
from sandlot.gateway.answering import SENT_STATUSES
from sandlot.trajectory.turn import Turn


@dataclass(frozen=True)
class Exchange:
    """One turn. `heard` are the messages that were new in its prompt, as the model was shown them; None where they
    cannot be told apart, as in a history that was rendered anew. `shown` is their rendered text in any case."""

    turn: Turn
    heard: tuple[Message, ...] | None
    shown: str
    said: Reply

    @property
    def calls(self) -> dict[str, ParsedCall]:
        """The calls in `said` that reached the agent as calls, by the end of the id that it was given."""
        return sent_calls(self.turn.id, self.said)


def sent_calls(turn_id: str, reply: Reply) -> dict[str, ParsedCall]:
    """The calls of a turn's reply that its agent was told of as calls, by the end of their ids."""
    return {f"{turn_id}_{k}": c for k, c in enumerate(c for c in reply.calls if c.status in SENT_STATUSES)}


def dialogue(turns: Iterable[Turn], fmt: ChatFormat) -> Iterator[Exchange]:
    """The turns of a session in the order they were sampled.

    Calls are read without the tools' schemas, which a journal does not hold: where a model writes arguments without
    types, numbers among them are text.
    """
    spoken: dict[str, Exchange] = {}
    for turn in turns:
        new, output = turn.new_ids.tolist(), turn.output_ids.tolist()
        before = spoken.get(turn.parent) if turn.parent is not None else None
        if before is not None and turn.shared == before.turn.length:
            names = [call.name for call in before.calls.values()]
            heard = unrender_tail(fmt, before.turn.output_ids.tolist(), names, new)
        else:
            heard = unrender_prompt(fmt, new) if turn.shared == 0 else None
        said = fmt.parse(output, new, (), truncated=turn.finish_reason == "length")
        spoken[turn.id] = Exchange(turn, heard, fmt.decode(new), said)
        yield spoken[turn.id]
