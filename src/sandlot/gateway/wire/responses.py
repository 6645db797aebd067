"""The OpenAI Responses protocol.

Every turn without a call carries a reasoning item, even an empty one: its `encrypted_content` is the mark by which the
turn is known when it comes back. `previous_response_id` goes on from a turn of the session, unless that was asked for
with `store: false`. A repeated `response.in_progress` keeps the connection alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandlot.chat.messages import Message
from sandlot.gateway.wire.base import Answer, ChatRequest, Head, Recall, Stored, WireError, nothing_stored
from sandlot.gateway.wire.canon import branch_of, invalid, is_retry, limit_of, new_tools, object_of, string
from sandlot.gateway.wire.framing import encode, event, sent
from sandlot.gateway.wire.openai_shared import ERRORS, error_object
from sandlot.gateway.wire.responses_input import steps_of, tools_of
from sandlot.gateway.wire.responses_output import items_of
from sandlot.gateway.wire.transcript import Transcript

_UNSTORED = {
    "conversation": "no conversations are stored here; send previous_response_id or the whole history in input",
    "prompt": "no prompts are stored here; send instructions and input",
}
_ANSWER = "chatcmpl-"
"""How the gateway's ids of answers start; those of this protocol end alike."""


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
        earlier = None
        if (previous := body.get("previous_response_id")) is not None:
            earlier = _earlier(previous, recall)
            transcript.go_on(earlier)
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
            earlier=earlier,
            previous=previous,
        )

    def body(self, answer: Answer, request: ChatRequest) -> bytes:
        """The whole response."""
        return encode(_finished(answer, request, [item.done for item in items_of(answer, request)]))

    def head(self, head: Head, request: ChatRequest) -> bytes:
        """`response.created` and the first `response.in_progress`."""
        response = _response(head, request)
        return _event("response.created", 0, response=response) + _event("response.in_progress", 1, response=response)

    def keepalive(self, head: Head, request: ChatRequest, beats: int = 0) -> bytes:
        """`response.in_progress`, which changes nothing."""
        return _event("response.in_progress", 2 + beats, response=_response(head, request))

    def tail(self, answer: Answer, request: ChatRequest, beats: int = 0) -> bytes:
        """Each item from `added` to `done`, then `response.completed` or `response.incomplete`."""
        items = items_of(answer, request)
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
        raise WireError("not_found", f"previous_response_id: {previous!r:.80}: {why}; send the whole history in input")
    return stored


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
