"""The Google generateContent protocol.

The minted mark of a turn rides on its last part as `thoughtSignature`; most clients send it back even where they drop
thoughts and ids of calls. Both spellings of a field are read, `functionCall` and `function_call`. Results that name
no id belong to the first open call of their name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

from sandlot.chat.messages import Message, Tool, ToolCall, canonical_json
from sandlot.gateway.wire.base import Answer, ChatRequest, ErrorKind, Head, Recall, WireError, nothing_stored
from sandlot.gateway.wire.canon import (
    branch_of,
    invalid,
    is_retry,
    join_text,
    limit_of,
    note,
    object_of,
    string,
    unwrapped,
    visible,
)
from sandlot.gateway.wire.framing import arguments_object, encode, event, sent
from sandlot.gateway.wire.transcript import Result, Step, Transcript, made_of

_TARGET = re.compile(r"/models/([^?]+):(\w+)(?:\?(.*))?$")
_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
_TYPES = frozenset({"ARRAY", "BOOLEAN", "INTEGER", "NULL", "NUMBER", "OBJECT", "STRING"})
_ASIDE = re.compile(r"thought(_?[sS]ignature)?|(video|part)_?[mM]etadata|media_?[rR]esolution")
"""Fields of a part that say something about another field of it."""
_RESULT_FIELDS = ("output", "result", "content", "error")
_ERRORS: dict[ErrorKind, tuple[int, str]] = {
    "invalid_request": (400, "INVALID_ARGUMENT"),
    "context_overflow": (400, "INVALID_ARGUMENT"),
    "authentication": (401, "UNAUTHENTICATED"),
    "budget": (403, "PERMISSION_DENIED"),
    "not_found": (404, "NOT_FOUND"),
    "too_large": (413, "INVALID_ARGUMENT"),
    "overloaded": (503, "UNAVAILABLE"),
}


class GoogleWire:
    """`POST /v1beta/models/{model}:generateContent` and `:streamGenerateContent`."""

    name = "google"
    paths: tuple[str, ...] = tuple(
        f"/{version}/models/{{model}}:{method}"
        for version in ("v1beta", "v1")
        for method in ("generateContent", "streamGenerateContent")
    )
    count_paths: tuple[str, ...] = ("/v1beta/models/{model}:countTokens", "/v1/models/{model}:countTokens")
    call_prefix = "call_"

    def parse(
        self, body: Any, headers: Mapping[str, str], target: str = "", recall: Recall = nothing_stored
    ) -> ChatRequest:
        """Canonical form of a request; which model, and whether and how to stream, is said by the path."""
        body = object_of(body)
        if isinstance(inner := _get(body, "generateContentRequest"), dict):
            body = inner  # how countTokens wraps a whole request
        model, method, query = found.groups() if (found := _TARGET.search(target)) else ("", "", "")
        config = _get(body, "generationConfig")
        config = config if isinstance(config, dict) else {}
        if _get(config, "candidateCount") not in (None, 1):
            raise invalid("candidateCount", "only one answer per request can be given; leave it out or send 1")
        if _get(body, "cachedContent") is not None:
            raise invalid("cachedContent", "nothing is stored here; send the whole history in contents")
        tools = _tools(body.get("tools"))
        return ChatRequest(
            messages=_messages(body),
            tools=tools,
            model=unquote(model),
            stream=method == "streamGenerateContent",
            max_tokens=limit_of(config, "maxOutputTokens", "max_output_tokens"),
            branch=branch_of(headers, tools),
            marked_retry=is_retry(headers),
            framing="events" if parse_qs(query or "").get("alt") == ["sse"] else "array",
        )

    def body(self, answer: Answer, request: ChatRequest) -> bytes:
        """The whole response."""
        return encode(_finished(answer, _parts(answer)))

    def head(self, head: Head, request: ChatRequest) -> bytes:
        """A chunk that says nothing yet."""
        chunk = _chunk(head, [{"text": ""}])
        return event(chunk) if request.framing == "events" else b"[" + encode(chunk)

    def keepalive(self, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """A chunk with one empty text."""
        return _framed(_chunk(head, [{"text": ""}]), request)

    def tail(self, answer: Answer, request: ChatRequest, beats: int = 0) -> bytes:
        """A chunk for each part; the last one says why the turn ended and what it used."""
        *parts, last = _parts(answer)
        chunks = [*(_chunk(answer.head, [part]) for part in parts), _finished(answer, [last])]
        return b"".join(_framed(chunk, request) for chunk in chunks) + _end(request)

    def error(self, error: WireError) -> tuple[int, bytes]:
        """Status and body. 403 makes agents stop at once; 503 and nothing else makes them retry."""
        return _ERRORS[error.kind][0], encode(_error(error))

    def error_event(self, error: WireError, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """The error inside a stream."""
        return _framed(_error(error), request) + _end(request)

    def count_body(self, tokens: int) -> bytes:
        """The answer of `countTokens`."""
        return encode({"totalTokens": tokens})


def _get(value: Mapping[str, Any], name: str) -> Any:
    """A field in either spelling."""
    return value[name] if name in value else value.get(re.sub(r"[A-Z]", lambda m: f"_{m[0].lower()}", name))


def _parts_of(content: Any, where: str) -> list[dict[str, Any]]:
    """The parts of a content, which may be a text, one part or a list of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"text": content}]
    parts = content.get("parts", [content] if "text" in content else None) if isinstance(content, dict) else content
    if parts is None:
        return []
    if isinstance(parts, dict):
        parts = [parts]
    if not isinstance(parts, list):
        raise invalid(where, "a content must have a list of parts")
    parts = [{"text": part} if isinstance(part, str) else part for part in parts]
    if not all(isinstance(part, dict) for part in parts):
        raise invalid(where, "a part must be an object")
    return parts


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    transcript = Transcript()
    if system := join_text(_text(part) for part in _parts_of(_get(body, "systemInstruction"), "systemInstruction")):
        transcript.add(Message("system", system))
    contents = body.get("contents")
    if isinstance(contents, str | dict):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        raise invalid("contents", "it must be a list of at least one content")
    transcript.take(contents, "contents", _steps)
    return transcript.done()


def _steps(content: Any, where: str) -> Sequence[Step]:
    role = content.get("role") if isinstance(content, dict) else None
    parts = _parts_of(content, where)
    if role == "model":
        return (_model(parts),)
    if role in (None, "", "user", "function", "tool"):
        return _user(parts, where)
    if role == "system":
        return (Message("system", join_text(_text(part) for part in parts)),)
    raise invalid(f"{where}.role", f"{role!r:.80} is unknown; it must be user or model")


def _user(parts: Sequence[dict[str, Any]], where: str) -> Sequence[Step]:
    texts: list[str] = []
    results: list[Step] = []
    for i, part in enumerate(parts):
        if not isinstance(response := _get(part, "functionResponse"), dict):
            texts.append(_text(part))
            continue
        call_id, name = string(response.get("id")), string(response.get("name"))
        text, is_error = _result(response.get("response"))
        text = join_text((text, *(_text(held) for held in _parts_of(response.get("parts"), f"{where}.parts.{i}"))))
        results.append(Result(f".parts.{i}", call_id, text, name, is_error, may_be_foreign=True))
    text = join_text(texts)
    return [*results, Message("user", text)] if text or not results else results


def _model(parts: Sequence[dict[str, Any]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    marks: list[str] = []
    for part in parts:
        marks.append(string(_get(part, "thoughtSignature")))
        if isinstance(call := _get(part, "functionCall"), dict):
            call_id = string(call.get("id"))
            calls.append(ToolCall(string(call.get("name")), unwrapped(call.get("args")), call_id))
            marks.append(call_id)
        elif part.get("thought") is True:
            thoughts.append(string(part.get("text")))
        else:
            texts.append(_text(part))
    return Message(
        "assistant",
        visible(join_text(texts)),
        join_text(thoughts),
        tuple(calls),
        marks=tuple(mark for mark in marks if mark),
    )


def _text(part: Mapping[str, Any]) -> str:
    """Text of a part that is no call and no result."""
    if isinstance(text := part.get("text"), str):
        return text
    kinds = [name for name, value in part.items() if value is not None and _ASIDE.fullmatch(name) is None]
    return note(kinds[0]) if kinds else ""


def _result(response: Any) -> tuple[str, bool]:
    """Text of a result, which clients wrap into an object in ways of their own; and whether it is an error."""
    if not isinstance(response, dict):
        return (response if isinstance(response, str) else canonical_json(response)), False
    fields = {key: value for key, value in response.items() if key != "name"}
    for field in _RESULT_FIELDS:
        if fields.keys() == {field} and isinstance(text := fields[field], str):
            return text, field == "error"
    return canonical_json(response), False


def _tools(declared: Any) -> tuple[Tool, ...]:
    """All functions that are declared. The vendor's own tools (search, code execution) are left out."""
    if declared is None:
        return ()
    if isinstance(declared, dict):
        declared = [declared]
    if not isinstance(declared, list):
        raise invalid("tools", "it must be a list")
    tools: list[Tool] = []
    for entry in declared:
        if isinstance(entry, dict):
            tools += made_of(entry, "tools", _functions)
    return tuple(tools)


def _functions(entry: Mapping[str, Any], where: str) -> list[Tool]:
    tools: list[Tool] = []
    functions = _get(entry, "functionDeclarations")
    for function in functions if isinstance(functions, list) else []:
        if isinstance(function, dict) and (name := string(function.get("name"))):
            schema = _get(function, "parametersJsonSchema") or _json_schema(function.get("parameters"))
            parameters = schema if isinstance(schema, dict) else {}
            tools.append(Tool(name, string(function.get("description")), parameters))
    return tools


def _json_schema(schema: Any) -> Any:
    """A schema of this protocol as JSON schema: names of types in lower case."""
    if isinstance(schema, list):
        return [_json_schema(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) and value in _TYPES else _json_schema(value)
        for key, value in schema.items()
    }


def _parts(answer: Answer) -> list[dict[str, Any]]:
    """The parts of a turn, never none, the last one with the mark."""
    parts: list[dict[str, Any]] = []
    if answer.reply.reasoning:
        parts.append({"text": answer.reply.reasoning, "thought": True})
    if answer.reply.text:
        parts.append({"text": answer.reply.text})
    for call_id, call in sent(answer).calls:
        parts.append({"functionCall": {"id": call_id, "name": call.name, "args": arguments_object(call)}})
    parts = parts or [{"text": ""}]
    parts[-1] |= {"thoughtSignature": answer.signature}
    return parts


def _chunk(head: Head, parts: list[dict[str, Any]], finish: str | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    return {"candidates": [candidate], "modelVersion": head.model, "responseId": head.id}


def _finished(answer: Answer, parts: list[dict[str, Any]]) -> dict[str, Any]:
    prompt, sampled = answer.head.prompt_tokens, answer.output_tokens
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
    return _chunk(answer.head, parts, _FINISH[sent(answer).finish]) | {"usageMetadata": usage}


def _framed(chunk: dict[str, Any], request: ChatRequest) -> bytes:
    return event(chunk) if request.framing == "events" else b",\n" + encode(chunk)


def _end(request: ChatRequest) -> bytes:
    return b"" if request.framing == "events" else b"]"


def _error(error: WireError) -> dict[str, Any]:
    code, status = _ERRORS[error.kind]
    return {"error": {"code": code, "message": str(error), "status": status}}
