"""The Anthropic Messages protocol.

Canonical form: one message becomes its tool results, in call order, then its text. A system message stands where it
is sent, also in the midst of `messages`. Only the telemetry line at the very top of the system prompt is left out: it
differs from conversation to conversation and says nothing to the model.

A request may keep its conversation here (`thread`), for the next one to go on from its answer by `previous_message_id`
with new messages alone; system prompt and tools are then those that the conversation began with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sandlot.chat.messages import Message, ParsedCall, Tool, ToolCall
from sandlot.gateway.wire.anthropic_tools import VENDORS_SEARCH, known_tool
from sandlot.gateway.wire.base import (
    Answer,
    ChatRequest,
    Deferred,
    ErrorKind,
    Head,
    Recall,
    Stored,
    WireError,
    nothing_stored,
)
from sandlot.gateway.wire.canon import (
    block_text,
    blocks_of,
    branch_of,
    invalid,
    is_retry,
    join_text,
    kind_of,
    limit_of,
    messages_of,
    new_tools,
    object_of,
    string,
    unwrapped,
    visible,
)
from sandlot.gateway.wire.framing import arguments_object, arguments_text, encode, event, sent, told_tools
from sandlot.gateway.wire.transcript import Found, Result, Step, Transcript, made_of

_OF_TOOLS = frozenset({"tool_reference", "tool_addition", "tool_removal"})
_BILLING = "x-anthropic-billing-header:"
_STOP_REASON = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS: dict[ErrorKind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "context_overflow": (400, "invalid_request_error"),
    "authentication": (401, "authentication_error"),
    "budget": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "too_large": (413, "request_too_large"),
    "overloaded": (529, "overloaded_error"),
}


class AnthropicWire:
    """`POST /v1/messages`, and the bodies of `/v1/messages/count_tokens`; also without the version."""

    name = "anthropic"
    paths: tuple[str, ...] = ("/v1/messages", "/messages")
    count_paths: tuple[str, ...] = ("/v1/messages/count_tokens", "/messages/count_tokens")
    call_prefix = "toolu_"

    def parse(
        self, body: Any, headers: Mapping[str, str], target: str = "", recall: Recall = nothing_stored
    ) -> ChatRequest:
        """Canonical form of a Messages (or count_tokens) request."""
        body = object_of(body)
        if body.get("compaction") is not None:
            raise invalid("compaction", "histories are not summarised here; ask for a summary in a message")
        transcript, items = Transcript(), messages_of(body)
        keep, earlier = _thread(body.get("thread"), recall)
        tools, deferred = _tools(body.get("tools"))
        system = _system(body.get("system"))
        if earlier is not None:
            _as_begun(earlier, system, tools)
            tools, deferred = earlier.tools, earlier.deferred
            transcript.go_on(earlier)
            items = list(items)  # what it is paired with is said elsewhere, so nothing is kept of how it was read
        elif system:
            transcript.add(Message("system", system))
        # A message that comes again tells of a tool what it told when it first came.
        transcript.take(items, "messages", partial(_steps, deferred=deferred))
        messages = transcript.done()
        return ChatRequest(
            messages=messages,
            tools=tools,
            model=string(body.get("model")),
            stream=body.get("stream") is True,
            max_tokens=limit_of(body, "max_tokens"),
            branch=branch_of(headers, tools),
            marked_retry=is_retry(headers),
            found=new_tools(transcript.found, tools),
            deferred=deferred,
            stored=messages if keep else None,
            earlier=earlier,
        )

    def body(self, answer: Answer, request: ChatRequest) -> bytes:
        """The whole message."""
        out = sent(answer)
        blocks: list[dict[str, Any]] = []
        if answer.reply.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reply.reasoning, "signature": answer.signature})
        if answer.reply.text:
            blocks.append({"type": "text", "text": answer.reply.text})
        blocks += [_tool_use(call_id, call, arguments_object(call)) for call_id, call in out.calls]
        message = _message(answer.head, blocks, answer.output_tokens)
        return encode(message | {"stop_reason": _STOP_REASON[out.finish]})

    def head(self, head: Head, request: ChatRequest) -> bytes:
        """`message_start` and a first ping."""
        start = event({"type": "message_start", "message": _message(head, [], 0)}, "message_start")
        return start + self.keepalive(head, request)

    def keepalive(self, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """A ping, which every client skips."""
        return event({"type": "ping"}, "ping")

    def tail(self, answer: Answer, request: ChatRequest, beats: int = 0) -> bytes:
        """The content blocks, each closed before the next begins, then the end of the message."""
        out = sent(answer)
        blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        if thinking := answer.reply.reasoning:
            deltas: list[dict[str, Any]] = [
                {"type": "thinking_delta", "thinking": thinking},
                {"type": "signature_delta", "signature": answer.signature},
            ]
            blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
        if text := answer.reply.text:
            blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": text}]))
        for call_id, call in out.calls:
            # Arguments travel as deltas only: clients ignore `input` in the start event. Raw text that is no object
            # goes out as it is, so that the agent makes its own error of it.
            deltas = [{"type": "input_json_delta", "partial_json": arguments_text(call)}]
            blocks.append((_tool_use(call_id, call, {}), deltas))
        frames: list[bytes] = []
        for index, (block, deltas) in enumerate(blocks):
            frames.append(_event("content_block_start", index=index, content_block=block))
            frames += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
            frames.append(_event("content_block_stop", index=index))
        end = {"stop_reason": _STOP_REASON[out.finish], "stop_sequence": None}
        frames.append(_event("message_delta", delta=end, usage=_usage(answer.head, answer.output_tokens)))
        frames.append(_event("message_stop"))
        return b"".join(frames)

    def error(self, error: WireError) -> tuple[int, bytes]:
        """Status and body. 403 is the one that makes the agent stop at once; 529 and nothing else makes it retry."""
        return _ERRORS[error.kind][0], encode(_error(error))

    def error_event(self, error: WireError, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """The error inside a stream."""
        return event(_error(error), "error")

    def count_body(self, tokens: int) -> bytes:
        """The answer of `count_tokens`."""
        return encode({"input_tokens": tokens})


def _thread(thread: Any, recall: Recall) -> tuple[bool, Stored | None]:
    """Whether the conversation is to be kept, and the one that it goes on from. The codes of the refusals are those by
    which the SDK sends the whole history instead."""
    if thread is None:
        return False, None
    kind = thread.get("type") if isinstance(thread, dict) else thread
    if kind == "create":
        return True, None
    if kind != "continue":
        problem = f"thread: {kind!r:.80} is unknown here; send the whole history without it"
        raise WireError("invalid_request", problem, "thread_unsupported_request")
    previous = thread.get("previous_message_id")
    if (stored := recall(string(previous))) is None:
        why = "this session has given no message of this id, or it was asked for without a thread"
        problem = f"thread.previous_message_id: {previous!r:.80}: {why}; send the whole history and a thread to create"
        raise WireError("not_found", problem, "thread_not_found")
    return True, stored


def _as_begun(earlier: Stored, system: str, tools: tuple[Tool, ...]) -> None:
    """Refuse a system prompt or tools that are not those which the thread began with."""
    for field, differs in (
        ("system", system and earlier.messages[0] != Message("system", system)),
        ("tools", tools and tools != earlier.tools),
    ):
        if differs:
            problem = f"{field}: a thread keeps those that it began with; leave it out, or begin another thread"
            raise WireError("invalid_request", problem, "thread_fingerprint_mismatch")


def _steps(message: Mapping[str, Any], where: str, deferred: Deferred) -> Sequence[Step]:
    role, content = message.get("role"), message.get("content")
    if role == "user":
        return _user(content, where, deferred)
    if role == "assistant":
        return (_assistant(content, where),)
    if role in ("system", "developer"):
        text, found = _text(content, f"{where}.content", deferred)
        return (Message("system", text), Found(found)) if found else (Message("system", text),)
    raise invalid(f"{where}.role", f"{role!r:.80} is unknown; it must be user, assistant or system")


def _text(content: Any, where: str, deferred: Deferred) -> tuple[str, tuple[Tool, ...]]:
    """Text of a content, and the tools that can be called from there on."""
    texts: list[str] = []
    found: list[Tool] = []
    for i, block in enumerate(blocks_of(content, where)):
        if isinstance(block, dict) and kind_of(block) in _OF_TOOLS:
            text, tools = _of_tool(block, deferred)
            texts.append(text)
            found += tools
        else:
            texts.append(block_text(block, f"{where}.{i}"))
    return join_text(texts), tuple(found)


def _of_tool(block: Mapping[str, Any], deferred: Deferred) -> tuple[str, Sequence[Tool]]:
    """What the model is told where a search found a tool, or where one is there, or gone, from now on."""
    held = block.get("tool")
    held = held if isinstance(held, dict) else block
    name, definition = string(held.get("name")) or string(held.get("tool_name")), held.get("definition")
    if block["type"] == "tool_removal":
        return f"The tool {name} is no longer available.", ()
    tool = _tool(definition, "tool") if isinstance(definition, dict) else deferred.get(name)
    return (told_tools([tool]), [tool]) if tool else (f"The tool {name} is available.", ())


def _system(content: Any) -> str:
    """The system prompt without the telemetry line at its top."""
    texts = [block_text(b, f"system.{i}") for i, b in enumerate(blocks_of(content, "system"))]
    if texts and texts[0].startswith(_BILLING):
        texts[0] = texts[0].partition("\n")[2]
    return join_text(texts)


def _user(content: Any, where: str, deferred: Deferred) -> Sequence[Step]:
    texts: list[str] = []
    results: list[Step] = []
    for i, block in enumerate(blocks_of(content, f"{where}.content")):
        place = f"{where}.content.{i}"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(block_text(block, place))
            continue
        if not (call_id := string(block.get("tool_use_id"))):
            raise invalid(f"{place}.tool_use_id", "a tool result must name its call by id")
        text, found = _text(block.get("content"), f"{place}.content", deferred)
        failed = block.get("is_error") is True
        results.append(Result(f".content.{i}", call_id, text, is_error=failed, found=found))
    text = join_text(texts)
    return [*results, Message("user", text)] if text or not results else results


def _assistant(content: Any, where: str) -> Message:
    """One assistant message; where its text stands between thoughts and calls does not count."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    marks: list[str] = []
    for i, block in enumerate(blocks_of(content, f"{where}.content")):
        place = f"{where}.content.{i}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(string(block.get("thinking")))
            marks.append(string(block.get("signature")))
        elif kind == "redacted_thinking":
            continue  # nothing of it can be read
        elif kind == "tool_use":
            call = ToolCall(string(block.get("name")), unwrapped(block.get("input")), string(block.get("id")))
            calls.append(call)
            marks.append(call.id)
        else:
            texts.append(visible(block_text(block, place)))
    return Message(
        "assistant", join_text(texts), join_text(thoughts), tuple(calls), marks=tuple(mark for mark in marks if mark)
    )


def _tools(tools: Any) -> tuple[tuple[Tool, ...], Deferred]:
    """The tools a model is shown, and those it is told of once a search of the client has found them.

    Shown are all that come with a schema, and those known by type that the client runs.
    """
    if tools is None:
        return (), {}
    if not isinstance(tools, list):
        raise invalid("tools", "it must be a list")
    tools = [tool for tool in tools if isinstance(tool, dict)]
    searching = not any(string(tool.get("type")).startswith(VENDORS_SEARCH) for tool in tools)
    shown: list[Tool] = []
    deferred: dict[str, Tool] = {}
    for i, entry in enumerate(tools):
        if (tool := made_of(entry, f"tools.{i}", _tool)) is None:
            continue
        if searching and entry.get("defer_loading") is True:
            deferred[tool.name] = tool
        else:
            shown.append(tool)
    return tuple(shown), deferred


def _tool(tool: Mapping[str, Any], where: str) -> Tool | None:
    name, description, schema = string(tool.get("name")), string(tool.get("description")), tool.get("input_schema")
    if not isinstance(schema, dict) and (known := known_tool(string(tool.get("type")))):
        description, schema = known
    return Tool(name, description, schema) if name and isinstance(schema, dict) else None


def _tool_use(call_id: str, call: ParsedCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": arguments}


def _message(head: Head, content: list[dict[str, Any]], output_tokens: int) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(head, output_tokens),
    }


def _usage(head: Head, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": head.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _error(error: WireError) -> dict[str, Any]:
    told: dict[str, Any] = {"type": _ERRORS[error.kind][1], "message": str(error)}
    if error.code:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told}
