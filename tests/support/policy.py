"""A policy for gateway tests: the toy model's real chat format, and an engine in this process that is told what to say.

The engine honours the same protocol as a client of a real server: exact ids, one logprob each, `checked` evidence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sandlot.chat.format import TemplateFormat
from sandlot.engine.base import EngineInfo, Generation, SamplingParams, checked
from sandlot.gateway.call import Policy

Say = Callable[[list[int], int], str | list[int] | BaseException]
"""Prompt ids and number of the call → text to tokenize, ids to emit as they are, or an error to raise."""


def call_text(name: str, arguments: dict[str, object] | str, *, before: str = "") -> str:
    """Text of a tool call as the toy model's template writes it."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'{before}<tool_call>\n{{"name": "{name}", "arguments": {raw}}}\n</tool_call>'


def encode_control(fmt: TemplateFormat, text: str) -> list[int]:
    """Ids of what a model would sample for `text`, control markup as control tokens."""
    return fmt.tokenizer.encode(fmt.tokenizer.conceal(text))


@dataclass
class ToldEngine:
    """Samples what `say` says. `hold` makes calls wait for `release`; `prompts` are all prompts it was asked."""

    fmt: TemplateFormat
    say: Say
    max_context: int = 131_072
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    aborted: int = 0
    hold: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def info(self) -> EngineInfo:
        return EngineInfo("told", "toy", self.max_context, "processed")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        number = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.asked.set()
        if self.hold:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        said = self.say(list(prompt_ids), number)
        if isinstance(said, BaseException):
            raise said
        stop = sampling.stop_token_ids[0]
        ids = [*encode_control(self.fmt, said), stop] if isinstance(said, str) else list(said)
        reason = "stop"
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        logprobs = tuple(-((i * 2654435761 + k) % 1000 + 1) / 400 for k, i in enumerate(ids))
        self.sampled.append(ids)
        return checked(Generation(tuple(ids), logprobs, reason), logprob_ids=ids, reported_tokens=len(ids))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def close(self) -> None: ...

    def policy(self) -> Policy:
        return Policy(self, self.fmt, "toy", SamplingParams(), self.max_context, "processed")
