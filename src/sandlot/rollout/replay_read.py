"""What is learnt of an answer, whole or event by event: how it ended, its tokens, and what the server says went wrong.

Fields that count are typed, so that an answer of another shape is told apart from one of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sandlot.rollout.replay_requests import Kind


class _ChatPart(msgspec.Struct):
    content: Any = None
    tool_calls: Any = None
    reasoning: Any = None
    reasoning_content: Any = None

    @property
    def says_something(self) -> bool:
        return bool(self.content or self.tool_calls or self.reasoning or self.reasoning_content)


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None
    delta: _ChatPart | None = None
    message: _ChatPart | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice] | None = None
    usage: _ChatUsage | None = None
    error: Any = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    error: Any = None


class _Responses(_Response):
    """A response, or an event of its stream."""

    type: str = ""
    response: _Response | None = None
    message: Any = None


class _AnthropicPart(msgspec.Struct):
    stop_reason: str | None = None
    usage: _Usage | None = None


class _Anthropic(_AnthropicPart):
    """A message, or an event of its stream."""

    type: str = ""
    message: _AnthropicPart | None = None
    delta: _AnthropicPart | None = None
    error: Any = None


class _GoogleContent(msgspec.Struct):
    parts: Any = None


class _GoogleCandidate(msgspec.Struct, rename="camel"):
    finish_reason: str | None = None
    content: _GoogleContent | None = None


class _GoogleUsage(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None


class _GoogleFeedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Google(msgspec.Struct, rename="camel"):
    candidates: list[_GoogleCandidate] | None = None
    usage_metadata: _GoogleUsage | None = None
    prompt_feedback: _GoogleFeedback | None = None
    error: Any = None


_DECODERS: dict[Kind, msgspec.json.Decoder[Any]] = {
    "chat": msgspec.json.Decoder(_Chat),
    "responses": msgspec.json.Decoder(_Responses),
    "anthropic": msgspec.json.Decoder(_Anthropic),
    "google": msgspec.json.Decoder(_Google),
}


class Reading:
    """One answer while it is read. `finish` is empty until it is complete, `error` until the server told of one."""

    def __init__(self, kind: Kind) -> None:
        self.finish = ""
        self.error = ""
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self._decode = _DECODERS[kind].decode
        readers: dict[Kind, Callable[[Any], bool]] = {
            "chat": self._chat,
            "responses": self._responses,
            "anthropic": self._anthropic,
            "google": self._google,
        }
        self._read = readers[kind]
        self._stop = ""

    def take(self, data: bytes) -> bool:
        """Take a whole answer, or the data of one event; whether it carries content.

        Raises `ValueError` or `RecursionError` where that is no JSON of the protocol.
        """
        told = self._decode(data)
        if told.error:
            self.error = message_of(told.error)
            return False
        return self._read(told)

    def _count(self, read: int | None, written: int | None) -> None:
        self.input_tokens = self.input_tokens if read is None else read
        self.output_tokens = self.output_tokens if written is None else written

    def _chat(self, told: _Chat) -> bool:
        if told.usage:
            self._count(told.usage.prompt_tokens, told.usage.completion_tokens)
        content = False
        for choice in told.choices or ():
            self.finish = choice.finish_reason or self.finish
            content |= any(part.says_something for part in (choice.delta, choice.message) if part)
        return content

    def _responses(self, told: _Responses) -> bool:
        if told.type == "error":  # here the error is the event
            self.error = message_of(told.message)
        response = told.response or told
        if response.error:
            self.error = message_of(response.error)
        if response.usage:
            self._count(response.usage.input_tokens, response.usage.output_tokens)
        if not told.type:
            self.finish = told.status or ""
        elif told.type in ("response.completed", "response.incomplete", "response.failed"):
            self.finish = told.type.removeprefix("response.")
        if self.finish == "failed":
            self.error = self.error or "the response failed"
        return told.type.endswith(".delta")

    def _anthropic(self, told: _Anthropic) -> bool:
        if usage := (told.message.usage if told.message else told.usage):
            read = usage.input_tokens
            if read is not None:  # what came from a cache is counted apart
                read += (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            self._count(read, usage.output_tokens)
        if told.type == "message":
            self.finish = told.stop_reason or ""
        elif told.type == "message_delta" and told.delta:
            self._stop = told.delta.stop_reason or ""
        elif told.type == "message_stop":
            self.finish = self._stop or "message_stop"
        return told.type == "content_block_delta"

    def _google(self, told: _Google) -> bool:
        if usage := told.usage_metadata:
            said = [n for n in (usage.candidates_token_count, usage.thoughts_token_count) if n is not None]
            self._count(usage.prompt_token_count, sum(said) if said else None)
        if told.prompt_feedback and told.prompt_feedback.block_reason:
            self.finish = told.prompt_feedback.block_reason
        content = False
        for candidate in told.candidates or ():
            self.finish = candidate.finish_reason or self.finish
            content |= bool(candidate.content and candidate.content.parts)
        return content


def message_of(error: Any) -> str:
    """What an error object says, in the words of the server, cut."""
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(text or error or "no reason given")[:300]
