"""The canonical conversation: what every wire protocol is translated into and compared by.

One wire message may become several canonical ones: an Anthropic user message with two tool results and a text
block is `tool, tool, user`. What carries no meaning (cache_control, ids of messages, key order, list or string
content, empty or absent content) is gone here, so equal conversations are equal values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

from sandlot.chat.literals import strings_in

Role = Literal["system", "user", "assistant", "tool"]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks; numbers that are equal are written equally (`5000.0` as `5000`)."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def digest(*parts: str | bytes) -> bytes:
    """16-byte hash of a sequence of parts, each framed by its length."""
    h = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.digest()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    `arguments` is an object, or the raw text where what the model wrote (or the client sent back) is not one.
    `id` is the wire's id: minted by the gateway for the policy's own calls, which is how they are known again.
    """

    name: str
    arguments: dict[str, Any] | str
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One canonical message.

    `text` is the visible content; `reasoning` only an assistant's; `tool_call_id` and `tool_name` only a tool
    result's. `marks` are opaque strings minted by the gateway that came back with an assistant message (tool-call
    ids, thinking signatures): they identify a turn of the session and are no part of the meaning.
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""
    is_error: bool = False
    marks: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def digest(self) -> bytes:
        """16-byte hash of what a template can show: ids of calls, reasoning, marks and `is_error` do not count."""
        calls = "".join(
            canonical_json([c.name, c.arguments if isinstance(c.arguments, str) else [c.arguments]])
            for c in self.tool_calls
        )
        return digest(self.role, self.text, calls)

    @cached_property
    def size(self) -> int:
        """Characters of its texts, those in the arguments of its calls too."""
        texts = [self.text, self.reasoning, self.tool_name, self.tool_call_id]
        for call in self.tool_calls:
            texts += [call.name, call.id, *strings_in(call.arguments)]
        return sum(map(len, texts))


@dataclass(frozen=True)
class Tool:
    """A tool the agent offers. `parameters` is its JSON schema.

    `kind` and `namespace` say how the agent's protocol wants to be told of a call: as a function, as `custom` raw
    text, as a `search` for more tools, in the form that it has for shells and patches. The model sees functions only,
    named `namespace__name` where there is one.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    kind: Literal["function", "custom", "search", "local_shell", "shell", "apply_patch"] = "function"
    namespace: str = ""

    def as_function(self) -> dict[str, Any]:
        """The form chat templates expect."""
        body = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": body}

    @cached_property
    def digest(self) -> bytes:
        """16-byte hash of what a template can show of it."""
        return digest(canonical_json([self.name, self.description, self.parameters]))

    @cached_property
    def size(self) -> int:
        """Characters of its texts, those in its schema too."""
        return sum(map(len, strings_in([self.name, self.description, self.parameters])))


def tools_digest(tools: tuple[Tool, ...]) -> bytes:
    """16-byte hash of the offered tools, in order (templates render them in order)."""
    return digest(*(tool.digest for tool in tools))


CallStatus = Literal["ok", "invalid_arguments", "unclosed", "missing_name", "unknown_tool"]


@dataclass(frozen=True)
class ParsedCall:
    """A call found in what the model wrote: `raw` is its text between the markers, byte for byte."""

    name: str
    arguments: dict[str, Any] | str
    raw: str
    status: CallStatus = "ok"


@dataclass(frozen=True)
class Reply:
    """What the model wrote, taken apart for the agent to read.

    `truncated`: the engine stopped at the token limit, or a call was never closed. `ambiguous`: two readings of
    the markup exist; the one given follows the tools' declared parameters.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    truncated: bool = False
    ambiguous: bool = False

    def as_message(self, call_ids: tuple[str, ...] = ()) -> Message:
        """The assistant message that a faithful client would send back."""
        ids = call_ids or ("",) * len(self.calls)
        calls = tuple(ToolCall(c.name, c.arguments, i) for c, i in zip(self.calls, ids, strict=True))
        return Message("assistant", self.text, self.reasoning, calls)
