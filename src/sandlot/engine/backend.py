"""What a model must offer to be served by `engine/server.py`: the embedded model and the scripted policy do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandlot.engine.base import SamplingParams, VersionSpan


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose ids, length and limits the server has checked. `sampling.max_tokens` is set."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    ignore_eos: bool = False
    score_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled. `ranks` say how many tokens were more likely, plus one.

    `prompt_logprobs` has an entry for each prompt token, None for the first. `finish_reason` is `stop`, `length` or
    `abort`; an aborted one has the tokens sampled so far.
    """

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int | None]
    finish_reason: str
    stop_reason: int | None
    versions: Sequence[VersionSpan]
    cached_tokens: int = 0
    prompt_logprobs: Sequence[float | None] | None = None


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the server tells about its model. `engine` is `embedded` or `scripted`."""

    engine: str
    model: str
    version: str
    max_context: int
    vocab_size: int
    logprobs_mode: str = "processed"


class Backend(Protocol):
    """A model behind the server. Its methods run on the event loop and must not block it."""

    info: BackendInfo
    weight_version: str

    async def generate(self, request: Request) -> Completion:
        """Sample. Cancelling the awaiting task frees what the request holds."""
        ...

    def abort(self, request_id: str) -> None:
        """End a running request early: its `generate` returns with finish reason `abort`. Unknown ids are ignored."""
        ...

    def running(self) -> int:
        """How many requests are in work or wait."""
        ...

    async def close(self) -> None: ...
