"""An answer that was cut off by an abort: what was sampled before, proven like a whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from sandlot.engine.base import Generation, checked
from sandlot.errors import EngineEvidenceError


@runtime_checkable
class Abortable(Protocol):
    """An engine that can be told to end a request early."""

    async def abort(self, request_id: str) -> None:
        """End the request early: its `generate` raises `EngineAbortedError`. Ids not in work are ignored."""
        ...


class EngineAbortedError(EngineEvidenceError):
    """The engine ended a request early. `partial` holds what was sampled until then, its evidence checked.

    It is no turn: whoever did not ask for the abort treats it like any refused reply.
    """

    def __init__(self, partial: Generation) -> None:
        super().__init__(
            "the engine's reply is refused: finish reason 'abort' is not a finished turn; "
            "nothing was recorded, the call may be repeated"
        )
        self.partial = partial


def aborted(
    generation: Generation, *, logprob_ids: Sequence[int], reported_tokens: int | None = None
) -> EngineAbortedError:
    """The error for an aborted reply. Raises `EngineEvidenceError` when its tokens are not proven either."""
    if generation.output_ids or generation.logprobs or logprob_ids or reported_tokens:
        checked(replace(generation, finish_reason="length"), logprob_ids=logprob_ids, reported_tokens=reported_tokens)
    else:
        generation = replace(generation, versions=())
    return EngineAbortedError(replace(generation, finish_reason="abort"))
