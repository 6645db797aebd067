"""What a call is made of: the policy it is sampled from, what was asked, the call in flight, what was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sandlot.chat.base import ChatFormat
from sandlot.chat.continuity import Match
from sandlot.engine.base import Engine, SamplingParams
from sandlot.gateway.wire.base import Answer, ChatRequest, Head
from sandlot.ids import Ids, PromptIds
from sandlot.trajectory.turn import Turn


class Recorder(Protocol):
    """Where a session's turns are kept. Blocking; called one at a time per session, in threads unless it is quick and
    nobody else is served."""

    def turn(self, turn: Turn) -> None: ...

    def delivered(self, turn_id: str) -> None: ...

    def event(self, kind: str, detail: Mapping[str, Any]) -> None: ...

    def sealed(self, detail: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Let go of what it holds: the session is deleted, sealed or not."""


@dataclass(frozen=True)
class Policy:
    """What samples for a session: shared by all sessions of a gateway unless one asks for its own sampling."""

    engine: Engine
    format: ChatFormat
    model: str
    sampling: SamplingParams
    max_context: int
    logprobs_mode: str


@dataclass(frozen=True)
class Asked:
    """What was sent to the engine, and for whom."""

    request: ChatRequest
    match: Match
    identity: bytes
    call_prefix: str
    head: Head
    prompt: PromptIds
    new_ids: Ids
    sampling: SamplingParams
    version: str

    @property
    def continued(self) -> str | None:
        """The turn whose prompt and output this prompt begins with."""
        return self.match.turn if len(self.new_ids) < len(self.prompt) else None


@dataclass(frozen=True)
class Told:
    """A recorded turn with what the agent is told of it."""

    turn_id: str
    answer: Answer


@dataclass
class Call:
    """One call in flight. Used as a context manager by each handler that waits for it: when the last one leaves, the
    call is cancelled and with it the engine's work, unless it is `kept`: sampled, and being recorded."""

    head: Head
    prepared: asyncio.Future[int]
    abandon: Callable[[], None] = field(init=False)
    task: asyncio.Task[Told] = field(init=False)
    kept: bool = False
    _waiters: int = 0

    def __enter__(self) -> Call:
        self._waiters += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiters -= 1
        if self._waiters == 0 and not self.kept and not self.task.done():
            self.abandon()

    async def ready(self) -> Head:
        """Wait until the prompt is known. Raises `WireError` when the call is refused before sampling."""
        return replace(self.head, prompt_tokens=await asyncio.shield(self.prepared))

    async def ended(self, timeout: float) -> bool:
        """Wait for the end of the call, however it ends, at most so many seconds; whether it has come."""
        if not self.task.done():
            await asyncio.wait((self.task,), timeout=timeout)
        return self.task.done()

    async def result(self) -> Told:
        """Wait for the recorded turn. Raises `WireError` when there is none."""
        return self.task.result() if self.task.done() else await asyncio.shield(self.task)


@dataclass
class Counters:
    """What happened so far. `engine_error` is the last engine failure that no later turn followed."""

    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    joined: int = 0
    replayed: int = 0
    abandoned: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    engine_error: str = ""
    stopped_by: str = ""
