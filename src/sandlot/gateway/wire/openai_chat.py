"""The OpenAI chat completions protocol.

Settings of the request that would change what is sampled or captured (logprobs, top_logprobs, stop, logit_bias,
temperature, seed, …) are not read: they belong to the gateway. Only `n` above 1 is refused, because an agent that
asks for two answers could not be given one without being misled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandlot.chat.messages import Message, ParsedCall, Tool, ToolCall
from sandlot.gateway.wire.base import Answer, ChatRequest, Head, Recall, WireError, nothing_stored
from sandlot.gateway.wire.canon import (
    arguments_of,
    branch_of,
    invalid,
    is_retry,
    limit_of,
    messages_of,
    object_of,
    string,
    text_of,
    visible,
)
from sandlot.gateway.wire.framing import arguments_text, encode, event, sent
from sandlot.gateway.wire.openai_shared import ERRORS, error_object, freeform_text, freeform_tool
from sandlot.gateway.wire.transcript import Result, Step, Transcript, made_of

_DONE = b"data: [DONE]\n\n"


class ChatWire:
    """`POST /v1/chat/completions`."""

    name = "chat"
    paths: tuple[str, ...] = ("/v1/chat/completions", "/chat/completions")
    count_paths: tuple[str, ...] = ()
    call_prefix = "call_"

    def parse(
        self, body: Any, headers: Mapping[str, str], target: str = "", recall: Recall = nothing_stored
    ) -> ChatRequest:
        """Canonical form of a chat completions request."""
        body = object_of(body)
        if body.get("n") not in (None, 1):
            raise invalid("n", "only one answer per request can be given; leave it out or send 1")
        tools = _tools(body)
        options = body.get("stream_options")
        return ChatRequest(
            messages=_messages(body),
            tools=tools,
            model=string(body.get("model")),
            stream=body.get("stream") is True,
            max_tokens=limit_of(body, "max_completion_tokens", "max_tokens"),
            branch=branch_of(headers, tools),
            marked_retry=is_retry(headers),
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def body(self, answer: Answer, request: ChatRequest) -> bytes:
        """The whole completion."""
        out = sent(answer)
        custom = _custom(request)
        calls = [_call(call_id, call, custom) for call_id, call in out.calls]
        message: dict[str, Any] = {"role": "assistant", "content": answer.reply.text or (None if calls else "")}
        if answer.reply.reasoning:
            message["reasoning_content"] = answer.reply.reasoning
        if calls:
            message["tool_calls"] = calls
        message["refusal"] = None
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": out.finish}
        frame = _frame(answer.head, "chat.completion", [choice])
        return encode(frame | {"usage": _usage(answer)})

    def head(self, head: Head, request: ChatRequest) -> bytes:
        """The chunk that names the role."""
        return _chunk(head, request, {"role": "assistant", "content": ""})

    def keepalive(self, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """A chunk that changes nothing; comments would break some clients' parsers."""
        return event(_frame(head, "chat.completion.chunk", [_choice({})]))

    def tail(self, answer: Answer, request: ChatRequest, beats: int = 0) -> bytes:
        """Reasoning, content and calls, the finish chunk, usage where it was asked for, and the end mark."""
        out = sent(answer)
        deltas: list[dict[str, Any]] = []
        if answer.reply.reasoning:
            deltas.append({"reasoning_content": answer.reply.reasoning})
        if answer.reply.text:
            deltas.append({"content": answer.reply.text})
        custom = _custom(request)
        for index, (call_id, call) in enumerate(out.calls):
            whole = _call(call_id, call, custom)
            kind, field = (whole["type"], "input" if whole["type"] == "custom" else "arguments")
            text = whole[kind].pop(field)
            deltas.append({"tool_calls": [{"index": index, **whole, kind: {**whole[kind], field: ""}}]})
            deltas.append({"tool_calls": [{"index": index, kind: {field: text}}]})
        frames = [_chunk(answer.head, request, delta) for delta in deltas]
        frames.append(_chunk(answer.head, request, {}, out.finish))
        if request.include_usage:
            frames.append(event(_frame(answer.head, "chat.completion.chunk", []) | {"usage": _usage(answer)}))
        frames.append(_DONE)
        return b"".join(frames)

    def error(self, error: WireError) -> tuple[int, bytes]:
        """Status and body. 403 makes agents stop at once; 503 and nothing else makes them retry."""
        return ERRORS[error.kind][0], encode(error_object(error))

    def error_event(self, error: WireError, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """The error inside a stream."""
        return event(error_object(error))

    def count_body(self, tokens: int) -> bytes:
        """This dialect has no path that counts; the shape is that of a usage."""
        return encode({"prompt_tokens": tokens})


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    transcript = Transcript()
    transcript.take(messages_of(body), "messages", _steps)
    return transcript.done()


def _steps(message: Mapping[str, Any], where: str) -> Sequence[Step]:
    role = message.get("role")
    if role == "assistant":
        return (_assistant(message, where),)
    text = text_of(message.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        return (Message("system", text),)
    if role == "user":
        return (Message("user", text),)
    if role in ("tool", "function"):
        return (Result("", string(message.get("tool_call_id")), text, string(message.get("name"))),)
    raise invalid(f"{where}.role", f"{role!r:.80} is unknown; it must be system, user, assistant or tool")


def _assistant(message: Mapping[str, Any], where: str) -> Message:
    text = text_of(message.get("content"), f"{where}.content") or string(message.get("refusal"))
    reasoning = string(message.get("reasoning_content")) or string(message.get("reasoning"))
    raw_calls = message.get("tool_calls") or []
    if not isinstance(raw_calls, list):
        raise invalid(f"{where}.tool_calls", "it must be a list")
    calls = [_parse_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(raw_calls)]
    if isinstance(legacy := message.get("function_call"), dict):
        calls.append(ToolCall(string(legacy.get("name")), arguments_of(legacy.get("arguments"))))
    marks = tuple(call.id for call in calls if call.id)
    return Message("assistant", visible(text), reasoning, tuple(calls), marks=marks)


def _parse_call(call: Any, where: str) -> ToolCall:
    if not isinstance(call, dict):
        raise invalid(where, "a tool call must be an object")
    call_id = string(call.get("id"))
    if isinstance(custom := call.get("custom"), dict):
        return ToolCall(string(custom.get("name")), {"input": string(custom.get("input"))}, call_id)
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", "a tool call must carry its function with name and arguments")
    return ToolCall(string(function.get("name")), arguments_of(function.get("arguments")), call_id)


def _tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Function tools, in either spelling; a freeform tool is shown as a function of one string."""
    tools: list[Tool] = []
    for entry in _objects(body, "tools"):
        tools += made_of(entry, "tools", _tool)
    for function in _objects(body, "functions"):
        tools += made_of(function, "functions", _function)
    return tuple(tools)


def _tool(entry: Mapping[str, Any], where: str) -> list[Tool]:
    if isinstance(custom := entry.get("custom"), dict) and (name := string(custom.get("name"))):
        return [freeform_tool(custom, name)]
    function = entry.get("function")
    return _function(function, where) if isinstance(function, dict) else []


def _function(function: Mapping[str, Any], where: str) -> list[Tool]:
    if not (name := string(function.get("name"))):
        return []
    parameters = function.get("parameters")
    return [Tool(name, string(function.get("description")), parameters if isinstance(parameters, dict) else {})]


def _objects(body: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    value = body.get(field)
    if value is not None and not isinstance(value, list):
        raise invalid(field, "it must be a list")
    return [entry for entry in value or [] if isinstance(entry, dict)]


def _custom(request: ChatRequest) -> frozenset[str]:
    """Names of the freeform tools."""
    return frozenset(tool.name for tool in request.tools if tool.kind == "custom")


def _call(call_id: str, call: ParsedCall, custom: frozenset[str]) -> dict[str, Any]:
    if call.name in custom:
        return {"id": call_id, "type": "custom", "custom": {"name": call.name, "input": freeform_text(call)}}
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


def _frame(head: Head, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _chunk(head: Head, request: ChatRequest, delta: dict[str, Any], finish: str | None = None) -> bytes:
    frame = _frame(head, "chat.completion.chunk", [_choice(delta, finish)])
    return event(frame | {"usage": None} if request.include_usage else frame)


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, output = answer.head.prompt_tokens, answer.output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
