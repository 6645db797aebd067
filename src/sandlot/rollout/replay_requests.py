"""Recorded HTTP requests, one a line: which protocol each speaks, and how it is sent to another server."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from sandlot.errors import ConfigError

Kind = Literal["chat", "responses", "anthropic", "google"]

_GZIP = b"\x1f\x8b"
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "document"})
_ANTHROPIC_KEYS = frozenset({"system", "stop_sequences", "thinking", "anthropic_version", "anthropic_beta"})


@dataclass(frozen=True)
class Recorded:
    """One request. `model` is what it asked for (Google's stands in the path)."""

    name: str
    kind: Kind
    body: dict[str, Any]
    model: str
    stream: bool

    def for_server(self, *, model: str | None = None, stream: bool | None = None) -> Recorded:
        """The same with another model, streamed or not."""
        body = dict(self.body)
        stream = self.stream if stream is None else stream
        model = model or self.model
        if self.kind == "google":
            return replace(self, model=model, stream=stream)
        if model:
            body["model"] = model
        if stream or "stream" in body:
            body["stream"] = stream
        if self.kind == "chat":
            if stream:  # without it the tokens of a stream are not counted
                given = body.get("stream_options")
                body["stream_options"] = {**(given if isinstance(given, dict) else {}), "include_usage": True}
            else:
                body.pop("stream_options", None)
        return replace(self, body=body, model=model, stream=stream)

    @property
    def path(self) -> str:
        """Where it is posted."""
        if self.kind == "google":
            way = "streamGenerateContent?alt=sse" if self.stream else "generateContent"
            return f"/v1beta/models/{self.model}:{way}"
        return {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}[self.kind]

    def headers(self, api_key: str | None) -> dict[str, str]:
        """What its protocol wants besides the body."""
        headers = {"Content-Type": "application/json"}
        if self.kind == "anthropic":
            headers["anthropic-version"] = "2023-06-01"
            return headers | ({"x-api-key": api_key} if api_key else {})
        if self.kind == "google":
            return headers | ({"x-goog-api-key": api_key} if api_key else {})
        return headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def read_requests(path: Path, *, keep_response_ids: bool = False) -> Iterator[Recorded]:
    """The requests of a JSONL file, which may be gzipped, one after another.

    A line is a request body, or an object with `body` (or `request`) and where it went in `path` or `url` (as in
    OpenAI's batch files). Raises `ConfigError` that names the first line that is neither. One that goes on from a
    response by its id, which only the server that gave it knows, becomes the whole history: an earlier line must have
    that response in `response`. With `keep_response_ids` it stays as it is, for that server.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: give a JSONL file with one recorded request a line")
    given: Given = {}
    empty = True
    for number, raw in enumerate(_lines(path), 1):
        if raw.strip():
            empty = False
            name = f"{path.name}:{number}"
            line = _line(raw, name)
            request = _request(line, name)
            if not keep_response_ids:
                request = _whole(request, line.get("response"), given)
            yield request
    if empty:
        raise ConfigError(f"{path} holds no request")


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        if file.peek(2)[:2] != _GZIP:
            yield from file
            return
        try:
            yield from gzip.GzipFile(fileobj=file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{path} is damaged: {error}; compress the file again") from error


def _line(raw: bytes, name: str) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is no JSON ({error}): each line must be one whole request") from error
    if not isinstance(line, dict):
        raise ConfigError(f"{name} is no JSON object: a line is a request body, or an object with body and path")
    return line


def _request(line: dict[str, Any], name: str) -> Recorded:
    target = str(line.get("path") or line.get("url") or "")
    body = line
    for key in ("body", "request"):
        if isinstance(line.get(key), dict) and "messages" not in line:
            body = line[key]
            break
    kind = kind_of(body, target)
    if kind is None and target:
        where = target.partition("?")[0]  # what follows may be a key
        raise ConfigError(f"{name} went to {where}, which is no call of a model: leave it out")
    if kind is None:
        raise ConfigError(
            f"{name} is no request that is known: it has neither messages (chat, Anthropic), nor input (Responses), "
            "nor contents (Google)"
        )
    model = str(body.get("model") or "")
    stream = bool(body.get("stream"))
    if kind == "google":
        stream = "streamGenerateContent" in target
        if "/models/" in target:
            model = target.partition("/models/")[2].partition("?")[0].rpartition(":")[0]
        model = model.removeprefix("models/")
        body = {key: value for key, value in body.items() if key not in ("model", "stream")}
    return Recorded(name, kind, body, model, stream)


Given = dict[str, dict[str, Any]]
"""Conversations by the id of the answer that ended them: what a request that goes on from it begins with."""


def _whole(request: Recorded, response: Any, given: Given) -> Recorded:
    """A request that names no earlier answer: one that does gets what was said before. Its own answer is added."""
    body = dict(request.body)
    if isinstance(response, dict):
        response = response.get("body", response)  # as in OpenAI's batch files
    response = response if isinstance(response, dict) else {}
    answer = str(response.get("id"))
    if request.kind == "responses":
        asked, previous = body.get("input"), body.pop("previous_response_id", None)
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else _list(asked)
        if previous is not None:
            body["input"] = items = [*_earlier(request, previous, given)["input"], *items]
        if isinstance(output := response.get("output"), list):
            given[answer] = {"input": [*items, *output]}
    elif request.kind == "anthropic" and isinstance(thread := body.pop("thread", None), dict):
        messages = _list(body.get("messages"))
        if thread.get("type") == "continue":
            earlier = _earlier(request, thread.get("previous_message_id"), given)
            messages = [*earlier["messages"], *messages]
            body = {**earlier, **body, "messages": messages}
        if isinstance(content := response.get("content"), list):
            offered: dict[str, Any] = {field: body[field] for field in ("system", "tools") if field in body}
            given[answer] = {**offered, "messages": [*messages, {"role": "assistant", "content": content}]}
    return replace(request, body=body)


def _earlier(request: Recorded, previous: Any, given: Given) -> dict[str, Any]:
    if (earlier := given.get(str(previous))) is None:
        raise ConfigError(
            f"{request.name} goes on from response {previous!r}, which no earlier line has and another server does "
            "not know: put each answer into its line as response, record requests with their whole history, or "
            "give --keep-response-ids where the server is the one that gave them"
        )
    return earlier


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def kind_of(body: Mapping[str, Any], target: str = "") -> Kind | None:
    """The protocol of a request, by where it went if that is known, else by its own shape."""
    path = target.partition("?")[0].rstrip("/")
    by_path: dict[str, Kind] = {
        "/chat/completions": "chat",
        "/responses": "responses",
        "/messages": "anthropic",
        "enerateContent": "google",
    }
    for ending, kind in by_path.items():
        if path.endswith(ending):
            return kind
    if path:
        return None
    if isinstance(body.get("contents"), list):
        return "google"
    if isinstance(body.get("messages"), list):
        return "anthropic" if _is_anthropic(body) else "chat"
    if isinstance(body.get("input"), str | list):
        return "responses"
    return None


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    if _ANTHROPIC_KEYS & body.keys():
        return True
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and "function" not in tool and "name" in tool:
            return True
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and (block.get("type") in _ANTHROPIC_BLOCKS or "cache_control" in block):
                return True
            if isinstance(block, dict) and block.get("type") == "image":
                return True
    return str(body.get("model", "")).startswith("claude")
