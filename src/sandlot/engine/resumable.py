"""An engine that can be paused for a weight update, either drained or cut off and continued where it was.

A call that is cut off keeps the tokens sampled so far; after the pause it goes on from prompt and kept tokens with what
is left of `max_tokens`. The parts are joined into one answer whose version spans say which weights sampled what. Each
part's evidence was checked when it arrived. An abort that nobody here asked for stays a refused reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

from sandlot.engine.aborted import Abortable, EngineAbortedError
from sandlot.engine.base import Engine, EngineInfo, Generation, SamplingParams, VersionSpan
from sandlot.errors import ConfigError, ContextOverflowError

PauseMode = Literal["drain", "abort"]

_AGAIN_S = 0.5
"""An abort that overtook its request did nothing; it is said again until the request has ended."""


class ResumableEngine:
    """Wraps an engine. `weight_version` is what parts are marked with where the engine names no version.

    `held` is entered for a session while a call of it is held back.
    """

    def __init__(
        self, engine: Engine, held: Callable[[str], AbstractContextManager[None]] = lambda session_id: nullcontext()
    ) -> None:
        self.weight_version = "0"
        self._engine = engine
        self._held = held
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[str] = set()
        self._cut: set[str] = set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def close(self) -> None:
        await self._engine.close()

    async def pause(self, mode: PauseMode = "drain") -> None:
        """Hold back what is to come and wait until nothing is at the engine: until it is done, or cut off.

        `ConfigError` when the engine cannot end requests early, or when someone resumes before it is idle.
        """
        if mode == "abort" and not isinstance(self._engine, Abortable):
            raise ConfigError("this engine cannot end a request early: pause with mode drain")
        self._open.clear()
        while self._running:
            if mode == "abort":
                await self._abort_all()
            await self._idle_or_open(_AGAIN_S if mode == "abort" else None)
            if self._open.is_set():
                raise ConfigError("the pause was ended by a resume before the engine was idle: pause again")

    async def _idle_or_open(self, timeout: float | None) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._open)]
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def resume(self, weight_version: str | None = None) -> None:
        """Go on, with `weight_version` from now on if given."""
        if weight_version is not None:
            self.weight_version = weight_version
        self._open.set()

    async def _abort_all(self) -> None:
        engine = self._engine
        assert isinstance(engine, Abortable)
        names = list(self._running)
        self._cut.update(names)
        # One that cannot be told is waited for like in a drain.
        await asyncio.gather(*(engine.abort(name) for name in names), return_exceptions=True)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        parts: list[Generation] = []
        kept: list[int] = []
        while True:
            while not self._open.is_set():
                with self._held(session_id):
                    await self._open.wait()
            name = f"{request_id}~{len(parts)}" if parts else request_id
            try:
                ids = [*prompt_ids, *kept] if kept else prompt_ids
                part = await self._part(ids, _left(sampling, kept, len(parts)), name, session_id)
            except ContextOverflowError:
                if not kept:
                    raise
                part = Generation((), (), "length")  # the kept tokens fill the context
            parts.append(part)
            kept += part.output_ids
            if ending := _ending(part, kept, sampling):
                return joined(parts, *ending)

    async def _part(self, ids: Sequence[int], sampling: SamplingParams, name: str, session_id: str) -> Generation:
        self._running.add(name)
        self._idle.clear()
        version = self.weight_version
        try:
            part = await self._engine.generate(ids, sampling, request_id=name, session_id=session_id)
        except EngineAbortedError as error:
            if name not in self._cut:
                raise
            part = error.partial
        finally:
            self._running.discard(name)
            self._cut.discard(name)
            if not self._running:
                self._idle.set()
        if part.output_ids and not part.versions:
            part = replace(part, versions=(VersionSpan(version, 0, len(part.output_ids)),))
        return part


def _left(sampling: SamplingParams, kept: Sequence[int], part: int) -> SamplingParams:
    """How to sample the next part. With the same seed it would draw the same random numbers again."""
    tokens = None if sampling.max_tokens is None else sampling.max_tokens - len(kept)
    seed = None if sampling.seed is None else sampling.seed + part
    return replace(sampling, max_tokens=tokens, seed=seed)


def _ending(part: Generation, kept: Sequence[int], sampling: SamplingParams) -> tuple[str, int | str | None] | None:
    """Finish and stop reason if the answer ends with this part, None if it goes on."""
    if part.finish_reason != "abort":
        return part.finish_reason, part.stop_reason
    if kept and kept[-1] in sampling.stop_token_ids:
        return "stop", kept[-1]
    if sampling.max_tokens is not None and len(kept) >= sampling.max_tokens:
        return "length", None
    return None


def joined(parts: Sequence[Generation], finish_reason: str, stop_reason: int | str | None) -> Generation:
    """The parts of one answer as one. `routed_experts` of several parts stay apart: (end of the part, its own)."""
    if len(parts) == 1 and parts[0].finish_reason == finish_reason:
        return parts[0]
    spans: list[VersionSpan] = []
    experts: list[tuple[int, object]] = []
    end = 0
    for part in parts:
        for span in part.versions:
            moved = VersionSpan(span.version, span.start + end, span.end + end)
            if spans and spans[-1].version == moved.version:
                moved = VersionSpan(moved.version, spans.pop().start, moved.end)
            spans.append(moved)
        end += len(part.output_ids)
        if part.routed_experts is not None:
            experts.append((end, part.routed_experts))
    return Generation(
        output_ids=tuple(i for part in parts for i in part.output_ids),
        logprobs=tuple(p for part in parts for p in part.logprobs),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        versions=tuple(spans),
        routed_experts=tuple(experts) or None,
        cached_tokens=parts[0].cached_tokens,
        lost_s=sum(part.lost_s for part in parts),
    )
