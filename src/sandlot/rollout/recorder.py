"""Keeps a session's turns in an episode's journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sandlot.trajectory.journal import JournalWriter
from sandlot.trajectory.records import EventRecord, SealedRecord
from sandlot.trajectory.turn import Turn


class JournalRecorder:
    """A gateway `Recorder` over a journal. `on_turn` is told the number of turns and of sampled tokens so far."""

    def __init__(self, journal: JournalWriter, on_turn: Callable[[int, int], None] | None = None) -> None:
        self._journal = journal
        self._on_turn = on_turn
        self._turns = 0
        self._tokens = 0

    def turn(self, turn: Turn) -> None:
        self._journal.turn(turn)
        self._turns += 1
        self._tokens += len(turn.output_ids)
        if self._on_turn is not None:
            self._on_turn(self._turns, self._tokens)

    def delivered(self, turn_id: str) -> None:
        if not self._journal.sealed:
            self._journal.delivered(turn_id)

    def event(self, kind: str, detail: Mapping[str, Any]) -> None:
        if not self._journal.sealed:
            self._journal.append(EventRecord(kind=kind, facts=dict(detail)))

    def sealed(self, detail: Mapping[str, Any]) -> None:
        self._journal.append(
            SealedRecord(
                reward=detail.get("reward"),
                group_id=detail.get("group_id"),
                metadata=dict(detail.get("metadata") or {}),
            )
        )

    def close(self) -> None:
        """The journal is its owner's, who goes on with it."""
