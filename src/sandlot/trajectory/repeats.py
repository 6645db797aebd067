"""What a prompt repeats of a session's earlier turns, so that a journal grows with new tokens only.

A prompt that continues a turn is stored as what is new in it. One whose history was rewritten continues none, but most
of it was there before, moved by a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from sandlot.errors import JournalError
from sandlot.ids import Ids, common_prefix, ids_array
from sandlot.trajectory.turn import Turn

_WORTH = 4096
"""New tokens of a turn from which on repeats are looked for."""
_PROBE = 64
"""Tokens that are looked for; no shorter repeat is told."""
_STRIDE = 8192
"""How far apart they are at most."""
_BRANCHES = 4
"""How many branches are looked at, the newest first."""


class Repeat(NamedTuple):
    """At `at` of a turn's new tokens stand the tokens `start:stop` of the whole sequence of the earlier turn `turn`."""

    at: int
    turn: str
    start: int
    stop: int

    @property
    def end(self) -> int:
        """Where it ends among the new tokens."""
        return self.at + self.stop - self.start


class Sequences:
    """The whole sequences (prompt and output) of the turns of one session, put together when they are asked for."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[str, Turn] = {}
        self._leaves: dict[str, None] = {}
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> None:
        """Take in the newest turn."""
        self._turns[turn.id] = turn
        if turn.parent is not None:
            self._leaves.pop(turn.parent, None)
        self._leaves[turn.id] = None

    def of(self, turn_id: str) -> Ids:
        """All tokens of a turn. `KeyError` where it, or one that it continues, is not there."""
        turn = self._turns[turn_id]
        parts, upto = [turn.output_ids, turn.new_ids], turn.shared
        while upto and turn.parent is not None:
            turn = self._turns[turn.parent]
            parts.append(turn.output_ids[: max(0, upto - turn.prompt_length)])
            parts.append(turn.new_ids[: max(0, upto - turn.shared)])
            upto = min(upto, turn.shared)
        return ids_array(np.concatenate(parts[::-1]))

    def repeats(self, turn: Turn) -> list[Repeat]:
        """What the new tokens of a turn, which is not yet here, repeat of the last branches, in order."""
        found: list[Repeat] = []
        if len(turn.new_ids) >= _WORTH:
            for leaf in islice(reversed(self._leaves), _BRANCHES):
                found = sorted([*found, *_repeats(turn.new_ids, found, leaf, self.of(leaf))])
        return found

    def restored(self, new_ids: Sequence[int], repeats: Sequence[Repeat]) -> Ids:
        """The new tokens of a turn, of which `new_ids` are those that are no repeats; undoes `remaining`.

        `JournalError` where that cannot be.
        """
        rest, parts, taken, at = ids_array(new_ids), [], 0, 0
        for repeat in repeats:
            whole = self.of(repeat.turn) if repeat.turn in self._turns else ids_array([])
            own = rest[taken : taken + repeat.at - at]
            if not (at <= repeat.at == at + len(own) and 0 <= repeat.start < repeat.stop <= len(whole)):
                raise JournalError(f"a repeat of turn {repeat.turn!r} at {repeat.at} is of tokens that are not there")
            parts += [own, whole[repeat.start : repeat.stop]]
            taken, at = taken + len(own), repeat.end
        return np.concatenate([*parts, rest[taken:]]) if parts else rest


def remaining(new_ids: Ids, repeats: Iterable[Repeat]) -> Ids:
    """New tokens without those that are repeats."""
    parts, at = [], 0
    for repeat in repeats:
        parts.append(new_ids[at : repeat.at])
        at = repeat.end
    return np.concatenate([*parts, new_ids[at:]]) if parts else new_ids


def _repeats(new: Ids, found: Sequence[Repeat], turn_id: str, whole: Ids) -> Iterator[Repeat]:
    """The repeats of one earlier sequence in the gaps that others left."""
    at = 0
    for repeat in [*found, Repeat(len(new), "", 0, 0)]:
        yield from _within(new, at, repeat.at, turn_id, whole)
        at = repeat.end


def _within(new: Ids, low: int, high: int, turn_id: str, whole: Ids) -> Iterator[Repeat]:
    """The repeats in `new[low:high]`: a few tokens are looked for here and there, and what is found is followed."""
    raw, at, step, last = whole.tobytes(), low, _PROBE, 0
    while at + _PROBE <= high:
        start = _find(raw, new[at : at + _PROBE].tobytes(), last)
        if start is None:
            at += step
            step = min(2 * step, _STRIDE)
            continue
        back = common_prefix(new[low:at][::-1], whole[:start][::-1])
        on = common_prefix(new[at:high], whole[start:])
        yield Repeat(at - back, turn_id, start - back, start + on)
        low = at = at + on
        step, last = _PROBE, start + on


def _find(raw: bytes, wanted: bytes, first: int) -> int | None:
    """Where a few tokens stand among many; looked for from `first` on, and then before it."""
    for at in (4 * first, 0):
        while (at := raw.find(wanted, at)) >= 0:
            if at % 4 == 0:
                return at // 4
            at += 1
    return None
