"""The OpenAI Responses protocol.

Every turn without a call carries a reasoning item, even an empty one: its `encrypted_content` is the mark by which the
turn is known when it comes back. `previous_response_id` goes on from a turn of the session, unless that was asked for
with `store: false`. A repeated `response.in_progress` keeps the connection alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandlot.chat.messages import Message, ParsedCall, Tool
from sandlot.gateway.wire.base import Answer, ChatRequest, Head, Recall, Stored, WireError, nothing_stored
from sandlot.gateway.wire.canon import branch_of, invalid, is_retry, limit_of, object_of, string
from sandlot.gateway.wire.framing import arguments_text, encode, event, sent
from sandlot.gateway.wire.minted import turn_of
from sandlot.gateway.wire.openai_shared import ERRORS, error_object, freeform_text
from sandlot.gateway.wire.responses_input import flat_name, new_tools, steps_of, tools_of
from sandlot.gateway.wire.transcript import Transcript

_UNSTORED = {
    "conversation": "no conversations are stored here; send previous_response_id or the whole history in input",
    "prompt": "no prompts are stored here; send instructions and input",
}
_ANSWER = "chatcmpl-"
"""How the gateway's ids of answers start; those of this protocol end alike."""


@dataclass(frozen=True)
class _Item:
    """One output item: as it starts, the events in between (without their place), as it ends."""

    started: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    done: dict[str, Any]


class ResponsesWire:
    """`POST /v1/responses`."""

    name = "responses"
    paths: tuple[str, ...] = ("/v1/responses", "/responses")
    count_paths: tuple[str, ...] = ("/v1/responses/input_tokens",)
    call_prefix = "call_"

    def parse(
        self, body: Any, headers: Mapping[str, str], target: str = "", recall: Recall = nothing_stored
    ) -> ChatRequest:
        """Canonical form of a Responses request."""
        body = object_of(body)
        for field, problem in _UNSTORED.items():
            if body.get(field) is not None:
                raise invalid(field, problem)
        if body.get("background") is True:
            raise invalid("background", "answers are given on the request itself only; leave it out")
        tools = tools_of(body.get("tools"), "tools")
        transcript, items = Transcript(), _input(body)
        if instructions := string(body.get("instructions")):
            transcript.add(Message("system", instructions))
        if (previous := body.get("previous_response_id")) is not None:
            transcript.go_on(_earlier(previous, recall))
            items = list(items)  # what it is paired with is said elsewhere, so nothing is kept of how it was read
        transcript.take(items, "input", steps_of)
        messages = transcript.done()
        return ChatRequest(
            messages=messages,
            tools=tools,
            model=string(body.get("model")),
            stream=body.get("stream") is True,
            max_tokens=limit_of(body, "max_output_tokens"),
            branch=branch_of(headers, tools),
            marked_retry=is_retry(headers),
            found=new_tools(transcript.found, tools),
            stored=None if body.get("store") is False else messages[1:] if instructions else messages,
            previous=previous,
        )

    def body(self, answer: Answer, request: ChatRequest) -> bytes:
        """The whole response."""
        return encode(_finished(answer, request, [item.done for item in _items(answer, request)]))

    def head(self, head: Head, request: ChatRequest) -> bytes:
        """`response.created` and the first `response.in_progress`."""
        response = _response(head, request)
        return _event("response.created", 0, response=response) + _event("response.in_progress", 1, response=response)

    def keepalive(self, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """`response.in_progress`, which changes nothing."""
        return _event("response.in_progress", 2 + beats, response=_response(head, request))

    def tail(self, answer: Answer, request: ChatRequest, beats: int = 0) -> bytes:
        """Each item from `added` to `done`, then `response.completed` or `response.incomplete`."""
        items = _items(answer, request)
        events: list[tuple[str, dict[str, Any]]] = []
        for index, item in enumerate(items):
            events.append(("response.output_item.added", {"output_index": index, "item": item.started}))
            place = {"item_id": item.done["id"], "output_index": index}
            events += [(kind, place | fields) for kind, fields in item.events]
            events.append(("response.output_item.done", {"output_index": index, "item": item.done}))
        response = _finished(answer, request, [item.done for item in items])
        events.append((f"response.{response['status']}", {"response": response}))
        return b"".join(_event(kind, number, **fields) for number, (kind, fields) in enumerate(events, 2 + beats))

    def error(self, error: WireError) -> tuple[int, bytes]:
        """Status and body. 403 makes agents stop at once; 503 and nothing else makes them retry."""
        return ERRORS[error.kind][0], encode(error_object(error))

    def error_event(self, error: WireError, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """`response.failed` with the error in it."""
        _, kind, code = ERRORS[error.kind]
        failure = {"status": "failed", "error": {"code": code or kind, "message": str(error)}}
        return _event("response.failed", 2 + beats, response=_response(head, request) | failure)

    def count_body(self, tokens: int) -> bytes:
        """The answer of `input_tokens`."""
        return encode({"object": "response.input_tokens", "input_tokens": tokens})


def _input(body: Mapping[str, Any]) -> Sequence[Any]:
    items = body.get("input")
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise invalid("input", "it must be a text or a list of at least one item")
    return items


def _earlier(previous: Any, recall: Recall) -> Stored:
    """What is stored under the id of an earlier response."""
    stored = recall(_ANSWER + string(previous).removeprefix("resp_"))
    if stored is None:
        why = "this session has given no response of this id, or it was asked for with store: false"
        raise WireError("not_found", f"previous_response_id: {previous!r}: {why}; send the whole history in input")
    return stored


def _items(answer: Answer, request: ChatRequest) -> list[_Item]:
    out, text, thought = sent(answer), answer.reply.text, answer.reply.reasoning
    turn = turn_of(answer.signature)
    items: list[_Item] = []
    if thought or not out.calls:
        items.append(_reasoning(f"rs_{turn}", thought, answer.signature))
    if text:
        cut = out.finish == "length" and not out.calls
        items.append(_message(f"msg_{turn}", text, "incomplete" if cut else "completed"))
    tools = {tool.name: tool for tool in request.callable}
    for index, (call_id, call) in enumerate(out.calls):
        items.append(_call(f"_{turn}_{index}", call_id, call, tools.get(call.name)))
    return items


def _reasoning(item_id: str, thought: str, signature: str) -> _Item:
    item = {"id": item_id, "type": "reasoning", "summary": [], "encrypted_content": signature}
    if not thought:
        return _Item(item, [], item)
    empty, part = ({"type": "summary_text", "text": value} for value in ("", thought))
    place = {"summary_index": 0}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.reasoning_summary_part.added", place | {"part": empty}),
        ("response.reasoning_summary_text.delta", place | {"delta": thought}),
        ("response.reasoning_summary_text.done", place | {"text": thought}),
        ("response.reasoning_summary_part.done", place | {"part": part}),
    ]
    return _Item(item, events, item | {"summary": [part]})


def _message(item_id: str, text: str, status: str) -> _Item:
    item = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    empty, part = ({"type": "output_text", "text": value, "annotations": [], "logprobs": []} for value in ("", text))
    place = {"content_index": 0}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.content_part.added", place | {"part": empty}),
        ("response.output_text.delta", place | {"delta": text, "logprobs": []}),
        ("response.output_text.done", place | {"text": text, "logprobs": []}),
        ("response.content_part.done", place | {"part": part}),
    ]
    return _Item(item, events, item | {"status": status, "content": [part]})


def _call(suffix: str, call_id: str, call: ParsedCall, tool: Tool | None) -> _Item:
    """A call in the form in which its tool was declared; an unknown tool is called as a function."""
    if tool is not None and tool.kind == "search":
        item = {"id": f"tsc{suffix}", "type": "tool_search_call", "call_id": call_id, "execution": "client"}
        done = item | {"status": "completed", "arguments": call.arguments}
        return _Item(item | {"status": "in_progress", "arguments": {}}, [], done)
    named: dict[str, Any] = {"call_id": call_id, "name": call.name}
    if tool is not None and tool.namespace:
        named |= {"name": call.name[len(flat_name(tool.namespace, "")) :], "namespace": tool.namespace}
    if tool is not None and tool.kind == "custom":
        text = freeform_text(call)
        item = {"id": f"ctc{suffix}", "type": "custom_tool_call", "status": "in_progress", **named, "input": ""}
        kind = "response.custom_tool_call_input"
        return _Item(
            item,
            [(f"{kind}.delta", {"delta": text}), (f"{kind}.done", {"input": text})],
            item | {"status": "completed", "input": text},
        )
    text = arguments_text(call)
    item = {"id": f"fc{suffix}", "type": "function_call", "status": "in_progress", **named, "arguments": ""}
    kind = "response.function_call_arguments"
    return _Item(
        item,
        [(f"{kind}.delta", {"delta": text}), (f"{kind}.done", {"name": named["name"], "arguments": text})],
        item | {"status": "completed", "arguments": text},
    )


def _response(head: Head, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": "resp_" + head.id.removeprefix(_ANSWER),
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.previous,
        "store": request.stored is not None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _finished(answer: Answer, request: ChatRequest, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = sent(answer).finish == "length"
    prompt, sampled = answer.head.prompt_tokens, answer.output_tokens
    return _response(answer.head, request) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _event(kind: str, number: int, **fields: Any) -> bytes:
    return event({"type": kind, "sequence_number": number, **fields}, kind)
