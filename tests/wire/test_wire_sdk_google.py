"""The official Google SDK against our bytes: streaming and not, thinking, parallel calls, cut turns, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from sandlot.chat.messages import Message, Reply
from sandlot.gateway.wire import ErrorKind, WireError
from sandlot.gateway.wire.google import GoogleWire
from support.wire_server import Vendor, answer, call, serve

WIRE = GoogleWire()
READS = tuple(call("Read", {"path": f"{n}.py", "note": 'café "x" \\ \u2028'}) for n in (1, 2, 3))
REPLIES = {
    "text": Reply("Hello \n world  "),
    "thinking": Reply("Done.", "look first\n"),
    "parallel": Reply("I read.", "think", READS),
    "unknown": Reply(calls=(call("Raed", {}, "unknown_tool"),)),
    "broken": Reply(calls=(call("Read", '{"path": "a', "invalid_arguments"),)),
    "thought": Reply("", "only a thought"),
    "cut": Reply("half a sen", truncated=True),
    "cut_call": Reply("", "hm", (READS[0], call("Write", {"path": "a"}, "unclosed")), truncated=True),
    "empty": Reply(),
}
READ = types.FunctionDeclaration(
    name="Read",
    description="d",
    parameters=types.Schema(type=types.Type.OBJECT, properties={"path": types.Schema(type=types.Type.STRING)}),
)
CONFIG = types.GenerateContentConfig(
    system_instruction="Be brief.", tools=[types.Tool(function_declarations=[READ])], max_output_tokens=64
)


@asynccontextmanager
async def client_of(vendor: Vendor) -> AsyncIterator[Any]:
    async with serve(vendor) as url:
        client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=url)).aio
        try:
            yield client
        finally:
            await client.aclose()


def echoed(reply: Reply) -> Message:
    """What a faithful client sends back: the calls that were sent, the rest as it was."""
    return Reply(reply.text, reply.reasoning, tuple(c for c in reply.calls if c.status != "unclosed")).as_message()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_a_turn_and_its_replay(name: str, stream: bool) -> None:
    reply = REPLIES[name]
    told = answer(WIRE, reply)
    vendor = Vendor(WIRE, told)
    user = types.Content(role="user", parts=[types.Part(text="go")])
    async with client_of(vendor) as client:
        ask: Any = {"model": "some-model", "config": CONFIG}
        if stream:
            chunks = [c async for c in await client.models.generate_content_stream(contents=[user], **ask)]
            parts = [p for c in chunks for p in c.candidates[0].content.parts]
            assert parts[0].text == ""
            assert [c.candidates[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
            last = chunks[-1]
        else:
            last = await client.models.generate_content(contents=[user], **ask)
            parts = last.candidates[0].content.parts
        assert last.candidates[0].finish_reason == ("MAX_TOKENS" if told.finish == "length" else "STOP")
        usage = last.usage_metadata
        assert (usage.prompt_token_count, usage.candidates_token_count, usage.total_token_count) == (11, 7, 18)
        assert [p.thought_signature is not None for p in parts] == [False] * (len(parts) - 1) + [True]
        uses = [p.function_call for p in parts if p.function_call]
        assert [u.id for u in uses] == list(told.call_ids[: len(uses)])
        results = [
            types.Part(function_response=types.FunctionResponse(id=u.id, name=u.name, response={"output": "r"}))
            for u in uses
        ]
        following = types.Content(role="user", parts=results or [types.Part(text="next")])
        history = [user, types.Content(role="model", parts=parts), following]
        await client.models.generate_content(contents=history, **ask)
    first, second = vendor.asked
    assert (first.model, first.stream, first.max_tokens) == ("some-model", stream, 64)
    assert first.messages[0] == Message("system", "Be brief.")
    assert first.tools[0].parameters == {"type": "object", "properties": {"path": {"type": "string"}}}
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    came = second.messages[len(first.messages)]
    assert came.digest == echoed(reply).digest
    assert came.reasoning == reply.reasoning
    assert set(came.marks) == {told.signature, *(u.id for u in uses)}
    assert [m.text for m in second.messages if m.role == "tool"] == ["r"] * len(uses)


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
    async with client_of(vendor) as client:
        with pytest.raises(errors.APIError, match="9 tokens > 8 maximum") as caught:
            await client.models.generate_content(model="m", contents="go")
    assert caught.value.code == status


async def test_an_error_inside_a_stream_is_raised() -> None:
    broken = WireError("overloaded", "the engine failed; send the request again")
    vendor = Vendor(WIRE, answer(WIRE, Reply("x")), break_stream=broken)
    async with client_of(vendor) as client:
        with pytest.raises(errors.APIError, match="the engine failed"):
            async for _ in await client.models.generate_content_stream(model="m", contents="go"):
                pass
