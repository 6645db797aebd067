"""What a wire protocol does for the gateway: translate a request in, frame an answer out, shape errors.

A wire is stateless and does no I/O: bytes and plain objects only. The gateway sends `head` at once, `keepalive`
while the engine works, and `tail` when the turn is recorded; a client that did not ask for a stream gets `body`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sandlot.chat.messages import Message, Reply, Tool

ErrorKind = Literal[
    "invalid_request",  # 400: malformed JSON or a field that cannot be understood
    "context_overflow",  # 400: worded so that the agent compacts
    "authentication",  # 401: unknown key
    "budget",  # 403: a limit of the session is spent, or the session is sealed: stop, do not retry
    "not_found",  # 404
    "too_large",  # 413: body over the cap
    "overloaded",  # 529 / 503: the engine failed; retry
]


class WireError(Exception):
    """An error to be told to the agent. The text names cause and cure in one sentence; `code` is a protocol's own word
    for it, by which its clients know what to do, where it has one."""

    def __init__(self, kind: ErrorKind, message: str, code: str = "") -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.code = code


Deferred = Mapping[str, Tool]
"""Tools by name that are declared and not yet shown."""


@dataclass(frozen=True)
class Stored:
    """What a request may go on from by the id of an answer: the conversation up to and with it, the tools that searches
    in it found, and what the answered request offered: tools that the prompt lists, and by name those that it does not.

    `since` are its messages after those of `before`, from which the answered request went on.
    """

    since: tuple[Message, ...]
    found: tuple[Tool, ...]
    tools: tuple[Tool, ...] = ()
    deferred: Deferred = field(default_factory=dict)
    before: Stored | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of the conversation."""
        parts, stored = [self.since], self.before
        while stored is not None:
            parts.append(stored.since)
            stored = stored.before
        return tuple(message for part in reversed(parts) for message in part)


Recall = Callable[[str], Stored | None]
"""Id of an answer of the session → what is stored under it."""


def nothing_stored(answer_id: str) -> None:
    """A `Recall` that knows no answer."""


@dataclass(frozen=True)
class ChatRequest:
    """One agent request in canonical form.

    Tool results that follow an assistant message stand in the order of its calls. `branch` is what the headers or
    body say of whose conversation this is (`main`, `subagent:<id>`, `side` when no tools are offered).
    `marked_retry`: the client says it sends this again. `max_tokens` is the agent's wish, None if it has none.
    `found` are tools that the conversation itself tells of (a tool search found them): they can be called, but the
    prompt lists `tools` only; `deferred` are those that it may yet tell of. `framing`: events, or one JSON array that
    is written piece by piece. `stored` is the conversation as a later request may go on from it, None where that is
    not wanted; `earlier` what this one goes on from, `previous` the id of that answer. `size`: bytes of its body.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    model: str
    stream: bool
    max_tokens: int | None = None
    branch: str = "main"
    marked_retry: bool = False
    include_usage: bool = True
    found: tuple[Tool, ...] = ()
    deferred: Deferred = field(default_factory=dict)
    framing: Literal["events", "array"] = "events"
    stored: tuple[Message, ...] | None = None
    earlier: Stored | None = None
    previous: str | None = None
    size: int = 0

    @property
    def callable(self) -> tuple[Tool, ...]:
        """All tools the model may call."""
        return (*self.tools, *self.found)


@dataclass(frozen=True)
class Head:
    """What is known before sampling: `id` and `created` (unix seconds) of the answer, tokens of the prompt."""

    id: str
    model: str
    prompt_tokens: int
    created: int


@dataclass(frozen=True)
class Answer:
    """A recorded turn to be told to the agent.

    `call_ids[i]` is the minted id of `reply.calls[i]`; `signature` the minted mark of the turn, put wherever the wire
    can carry one back (a thinking signature). `finish`: `stop`, `tool_calls` or `length`.
    """

    head: Head
    reply: Reply
    call_ids: tuple[str, ...]
    signature: str
    finish: Literal["stop", "tool_calls", "length"]
    output_tokens: int


class Wire(Protocol):
    """One protocol. `request` is what `parse` made of the request that is being answered."""

    name: str
    paths: tuple[str, ...]
    """Where requests are posted, as route patterns: `{model}` stands for any text."""
    count_paths: tuple[str, ...]
    """Where the same requests are posted to have their tokens counted."""
    call_prefix: str
    """How minted tool-call ids start: `toolu_` or `call_`."""

    def parse(
        self, body: Any, headers: Mapping[str, str], target: str = "", recall: Recall = nothing_stored
    ) -> ChatRequest:
        """Canonical form of a decoded JSON body. Header names are lower-case; `target` is the path with its query.

        Unknown fields, block types and tool types are accepted: what cannot be rendered becomes a note in its place.
        `WireError` when the request makes no sense.
        """
        ...

    def body(self, answer: Answer, request: ChatRequest) -> bytes:
        """The whole JSON answer."""
        ...

    def head(self, head: Head, request: ChatRequest) -> bytes:
        """First bytes of a stream."""
        ...

    def keepalive(self, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """A protocol-native no-op event. `beats`: how many of them the stream has had since its head."""
        ...

    def tail(self, answer: Answer, request: ChatRequest, beats: int = 0) -> bytes:
        """All remaining events of a stream, the terminal one last."""
        ...

    def error(self, error: WireError) -> tuple[int, bytes]:
        """HTTP status and JSON body in the dialect's shape."""
        ...

    def error_event(self, error: WireError, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """The same inside a stream that has begun, which it ends."""
        ...

    def count_body(self, tokens: int) -> bytes:
        """The answer that tells the exact number of prompt tokens."""
        ...
