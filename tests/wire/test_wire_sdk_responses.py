"""The official OpenAI SDK against our Responses bytes: streaming and not, every kind of tool, cut turns, errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from sandlot.chat.messages import Message, Reply
from sandlot.gateway.wire import ErrorKind, WireError
from sandlot.gateway.wire.responses import ResponsesWire
from support.wire_server import Vendor, answer, call, serve

WIRE = ResponsesWire()
PATCH = "*** Begin Patch\n*** Add File: a.txt\n+hi\n*** End Patch"
READS = tuple(call("Read", {"path": f"{n}.py", "note": 'café "x" \\ \u2028'}) for n in (1, 2, 3))
KINDS = (
    call("apply_patch", {"input": PATCH}),
    call("agents__spawn", {"message": "go"}),
    call("tool_search", {"query": "spawn", "limit": 8}),
    READS[0],
)
REPLIES = {
    "text": Reply("Hello \n world  "),
    "thinking": Reply("Done.", "look first\n"),
    "parallel": Reply("I read.", "think", READS),
    "kinds": Reply("", "hm", KINDS),
    "unknown": Reply(calls=(call("Raed", {}, "unknown_tool"),)),
    "thought": Reply("", "only a thought"),
    "cut": Reply("half a sen", truncated=True),
    "cut_call": Reply("", "hm", (READS[0], call("Write", {"path": "a"}, "unclosed")), truncated=True),
    "empty": Reply(),
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
TOOLS: Any = [
    {"type": "function", "name": "Read", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "edits", "format": GRAMMAR},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [SPAWN]},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
    {"type": "web_search"},
]
OUTPUT = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "tool_search_call": "tool_search_output",
}
ASK: Any = [{"role": "user", "content": "go"}]


def echoed(reply: Reply) -> Message:
    """What a faithful client sends back: the calls that were sent, the rest as it was."""
    return Reply(reply.text, reply.reasoning, tuple(c for c in reply.calls if c.status != "unclosed")).as_message()


def outputs(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A result for each call, in the form its kind has."""
    results: list[dict[str, Any]] = []
    for item in items:
        if kind := OUTPUT.get(item["type"]):
            more: dict[str, Any] = {"output": "r"}
            if kind == "tool_search_output":
                more = {"tools": [], "execution": "client", "status": "completed"}
            results.append({"type": kind, "call_id": item["call_id"], **more})
    return results


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_a_turn_and_its_replay(name: str, stream: bool) -> None:
    reply = REPLIES[name]
    told = answer(WIRE, reply)
    vendor = Vendor(WIRE, told)
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        ask: Any = {"model": "m", "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
        if stream:
            async with client.responses.stream(input=ASK, **ask) as events:
                seen: list[Any] = [event async for event in events]
                kinds = [event.type for event in seen]
                response: Any = await events.get_final_response() if "response.completed" in kinds else None
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
            assert kinds[-1] == ("response.incomplete" if told.finish == "length" else "response.completed")
            raw = await client.responses.create(input=ASK, stream=True, **ask)
            last: Any = [event async for event in raw][-1]
            if response is None:
                response = last.response
            vendor.asked.pop()
        else:
            response = await client.responses.create(input=ASK, **ask)
        assert response.output_text == reply.text
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (11, 7, 18)
        assert response.status == ("incomplete" if told.finish == "length" else "completed")
        if told.finish == "length":
            assert response.incomplete_details.reason == "max_output_tokens"
        assert response.id.startswith("resp_")
        items = [item.model_dump(exclude_none=True, mode="json") for item in response.output]
        assert len({item["id"] for item in items}) == len(items)
        calls = [item for item in items if "call_id" in item]
        assert [item["call_id"] for item in calls] == list(told.call_ids[: len(calls)])
        following = outputs(items) or [{"role": "user", "content": "next"}]
        await client.responses.create(input=[*ASK, *items, *following], **ask)
    first, second = vendor.asked
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    came = second.messages[len(first.messages)]
    assert came.digest == echoed(reply).digest
    assert came.reasoning == reply.reasoning
    assert set(came.marks) >= {item["call_id"] for item in calls}
    assert told.signature in came.marks or calls
    assert [m.tool_call_id for m in second.messages if m.role == "tool"] == [item["call_id"] for item in calls]


async def test_every_kind_of_tool_is_called_in_its_own_form() -> None:
    vendor = Vendor(WIRE, answer(WIRE, REPLIES["kinds"]))
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        response = await client.responses.create(model="m", input="go", tools=TOOLS)
    shown = {tool.name: tool for tool in vendor.asked[0].tools}
    assert list(shown) == ["Read", "apply_patch", "agents__spawn", "tool_search"]
    assert list(shown["apply_patch"].parameters["properties"]) == ["input"]
    assert GRAMMAR["definition"] in shown["apply_patch"].parameters["properties"]["input"]["description"]
    items: list[Any] = response.output[1:]
    assert [item.type for item in items] == ["custom_tool_call", "function_call", "tool_search_call", "function_call"]
    assert (items[0].name, items[0].input) == ("apply_patch", PATCH)
    assert (items[1].name, items[1].namespace, items[1].arguments) == ("spawn", "agents", '{"message":"go"}')
    assert (items[2].execution, items[2].arguments) == ("client", {"query": "spawn", "limit": 8})
    assert items[3].namespace is None


async def test_raw_text_streams_as_input_deltas() -> None:
    vendor = Vendor(WIRE, answer(WIRE, Reply(calls=KINDS[:1])))
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        stream = await client.responses.create(model="m", input="go", tools=TOOLS, stream=True)
        events: list[Any] = [event async for event in stream]
    kinds = [event.type for event in events]
    at = kinds.index("response.output_item.added")
    assert kinds[at:] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[at].item.input == ""
    assert events[at + 1].delta == events[at + 2].input == events[at + 3].item.input == PATCH
    assert {event.item_id for event in events[at + 1 : at + 3]} == {events[at].item.id}
    assert not any(kind.startswith("response.function_call") for kind in kinds)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("invalid_request", 400),
        ("context_overflow", 400),
        ("authentication", 401),
        ("budget", 403),
        ("not_found", 404),
        ("too_large", 413),
        ("overloaded", 503),
    ],
)
async def test_errors(kind: ErrorKind, status: int) -> None:
    vendor = Vendor(WIRE, refusal=WireError(kind, "prompt is too long: 9 tokens > 8 maximum"))
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="9 tokens > 8 maximum") as caught:
            await client.responses.create(model="m", input="go")
    assert caught.value.status_code == status
    if kind == "context_overflow":
        assert caught.value.code == "context_length_exceeded"


async def test_an_error_inside_a_stream_ends_it_as_failed() -> None:
    broken = WireError("overloaded", "the engine failed; send the request again")
    vendor = Vendor(WIRE, answer(WIRE, Reply("x")), break_stream=broken)
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        stream = await client.responses.create(model="m", input="go", stream=True)
        last: Any = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert "the engine failed" in last.response.error.message
