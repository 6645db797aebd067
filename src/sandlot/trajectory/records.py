"""The records of an episode's journal, as they are written in JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sandlot.errors import JournalError
from sandlot.ids import ids_array
from sandlot.trajectory.repeats import Repeat, Sequences, remaining
from sandlot.trajectory.turn import Turn

SCHEMA_VERSION = 1

FINISH_REASONS = ("stop", "length")
"""The finish reasons of an accepted turn; an aborted generation is none."""


class SessionRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="session", forbid_unknown_fields=True
):
    """The first record: whose session this is and what is needed to make its samples again from the journal alone.

    `max_tokens` cuts samples at whole turns. `metadata` goes into every sample; `session` holds what only the journal
    needs (task, harness, engine, limits).
    """

    episode_id: str
    group_id: str
    schema: int = SCHEMA_VERSION
    created: float = msgspec.field(default_factory=time.time)
    sampling: dict[str, Any] = {}
    max_tokens: int | None = None
    metadata: dict[str, Any] = {}
    session: dict[str, Any] = {}


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="turn", forbid_unknown_fields=True):
    """One turn, the prompt as a delta; see `sandlot.trajectory.turn.Turn`.

    Of the new tokens of a long delta, `new_ids` are those that do not stand in an earlier turn (`repeats`).
    """

    id: str
    parent: str | None
    shared: int
    new_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_sha256: str
    prompt_length: int
    versions: list[tuple[str, int, int]]
    sampling: dict[str, Any]
    logprobs_mode: str
    model: str
    created: float
    request_sha256: str = ""
    branch: str = "main"
    fork: str = ""
    parse: list[str] = []
    delivered: bool = False
    metadata: dict[str, Any] = {}
    repeats: list[Repeat] = []

    @classmethod
    def of(cls, turn: Turn, repeats: Sequence[Repeat] = ()) -> TurnRecord:
        """The record of a turn that an engine has really sampled; `JournalError` when the turn cannot be one."""
        ids, logprobs = ids_array(turn.output_ids), np.asarray(turn.logprobs, dtype=np.float64)
        if not len(ids) or logprobs.shape != ids.shape or not np.isfinite(logprobs).all():
            raise JournalError(
                f"turn {turn.id!r} is not recorded: {len(ids)} sampled tokens need as many finite logprobs (got "
                f"{logprobs.size})"
            )
        if turn.finish_reason not in FINISH_REASONS:
            raise JournalError(f"turn {turn.id!r} is not recorded: {turn.finish_reason!r} is not a finished turn")
        return cls(
            id=turn.id,
            parent=turn.parent,
            shared=turn.shared,
            new_ids=remaining(ids_array(turn.new_ids), repeats).tolist(),
            output_ids=ids.tolist(),
            logprobs=logprobs.tolist(),
            finish_reason=turn.finish_reason,
            prompt_sha256=turn.prompt_sha256,
            prompt_length=turn.prompt_length,
            versions=list(turn.versions),
            sampling=dict(turn.sampling),
            logprobs_mode=turn.logprobs_mode,
            model=turn.model,
            created=turn.created,
            request_sha256=turn.request_sha256,
            branch=turn.branch,
            fork=turn.fork,
            parse=list(turn.parse),
            delivered=turn.delivered,
            metadata=dict(turn.metadata),
            repeats=list(repeats),
        )

    def turn(self, earlier: Sequences, *, delivered: bool = False) -> Turn:
        """The turn as it was recorded after `earlier` ones; `delivered` adds what a later record said."""
        return Turn(
            id=self.id,
            parent=self.parent,
            shared=self.shared,
            new_ids=earlier.restored(self.new_ids, self.repeats),
            output_ids=ids_array(self.output_ids),
            logprobs=np.asarray(self.logprobs, dtype=np.float64),
            finish_reason=self.finish_reason,
            prompt_sha256=self.prompt_sha256,
            prompt_length=self.prompt_length,
            versions=tuple(self.versions),
            sampling=self.sampling,
            logprobs_mode=self.logprobs_mode,
            model=self.model,
            created=self.created,
            request_sha256=self.request_sha256,
            branch=self.branch,
            fork=self.fork,
            parse=tuple(self.parse),
            delivered=self.delivered or delivered,
            metadata=self.metadata,
        )


class DeliveredRecord(msgspec.Struct, frozen=True, tag_field="type", tag="delivered", forbid_unknown_fields=True):
    """The whole reply of a turn reached the client."""

    turn: str


class ForkRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="fork", forbid_unknown_fields=True):
    """Why a request did not continue an earlier turn; `facts` hold the first difference."""

    turn: str
    reason: str
    facts: dict[str, Any] = {}


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="event", forbid_unknown_fields=True):
    """Anything else worth keeping: an engine error, a refused request, a limit that was reached."""

    kind: str
    turn: str | None = None
    time: float = msgspec.field(default_factory=time.time)
    facts: dict[str, Any] = {}


class SealedRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="sealed", forbid_unknown_fields=True
):
    """The last record: the episode is over. `reward` is None when ungraded, `failure` a failure kind or None.

    `verdict` is the evidence of grading, `metadata` what the result row of the episode should carry; `group_id` takes
    the place of the one in the session record, where it is named.
    """

    reward: float | None = None
    failure: str | None = None
    group_id: str | None = None
    verdict: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    time: float = msgspec.field(default_factory=time.time)


Record = SessionRecord | TurnRecord | DeliveredRecord | ForkRecord | EventRecord | SealedRecord
