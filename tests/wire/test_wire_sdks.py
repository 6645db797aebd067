"""The official SDKs against our bytes: streaming and not, thinking, parallel calls, cut turns, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from sandlot.chat.messages import Message, Reply
from sandlot.gateway.wire import ErrorKind, WireError
from sandlot.gateway.wire.anthropic import AnthropicWire
from sandlot.gateway.wire.openai_chat import ChatWire
from support.wire_server import Vendor, answer, call, serve

READS = tuple(call("Read", {"path": f"{n}.py", "note": 'café "x" \\ \u2028'}) for n in (1, 2, 3))
UNKNOWN = (call("Raed", {}, "unknown_tool"),)
CUT = call("Write", {"path": "a"}, "unclosed")
REPLIES = {
    "text": Reply("Hello \n world  "),
    "thinking": Reply("Done.", "look first\n"),
    "parallel": Reply("I read.", "think", READS),
    "calls": Reply(calls=UNKNOWN),
    "thought": Reply("", "only a thought"),
    "cut": Reply("half a sen", truncated=True),
    "cut_call": Reply("", "hm", (READS[0], CUT), truncated=True),
    "empty": Reply(),
}
MESSAGES: Any = [{"role": "user", "content": "go"}]
A_TOOLS: Any = [{"name": "Read", "description": "d", "input_schema": {"type": "object"}}]
C_TOOLS: Any = [{"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}]
ERRORS: list[tuple[ErrorKind, int]] = [
    ("invalid_request", 400),
    ("context_overflow", 400),
    ("authentication", 401),
    ("budget", 403),
    ("not_found", 404),
    ("too_large", 413),
]


def echoed(reply: Reply) -> Message:
    """What a faithful client sends back: the calls that were sent, the rest as it was."""
    return Reply(reply.text, reply.reasoning, tuple(c for c in reply.calls if c.status != "unclosed")).as_message()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_anthropic(name: str, stream: bool) -> None:
    reply, wire = REPLIES[name], AnthropicWire()
    told = answer(wire, reply)
    vendor = Vendor(wire, told)
    async with serve(vendor) as url, anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        ask: Any = {"model": "m", "max_tokens": 64, "messages": MESSAGES, "tools": A_TOOLS}
        if stream:
            async with client.messages.stream(**ask) as events:
                seen = [event.type async for event in events]
                message = await events.get_final_message()
            assert seen[0] == "message_start"
            assert seen[-1] == "message_stop"
        else:
            message = await client.messages.create(**ask)
        assert message.usage.input_tokens == 11
        assert message.usage.output_tokens == 7
        assert (
            message.stop_reason == {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[told.finish]
        )
        uses = [b for b in message.content if b.type == "tool_use"]
        assert [u.id for u in uses] == list(told.call_ids[: len(uses)])
        assert all(b.signature == told.signature for b in message.content if b.type == "thinking")
        content = [block.model_dump(exclude_none=True, mode="json") for block in message.content]
        following: Any = [{"type": "tool_result", "tool_use_id": u.id, "content": "r"} for u in uses] or "next"
        replay: Any = [*MESSAGES, {"role": "assistant", "content": content}, {"role": "user", "content": following}]
        await client.messages.create(model="m", max_tokens=64, messages=replay, tools=A_TOOLS)
    first, second = vendor.asked
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    came = second.messages[len(first.messages)]
    assert came.digest == echoed(reply).digest
    assert came.reasoning == reply.reasoning
    assert set(came.marks) == {*(u.id for u in uses), *([told.signature] if reply.reasoning else [])}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_openai_chat(name: str, stream: bool) -> None:
    reply, wire = REPLIES[name], ChatWire()
    told = answer(wire, reply)
    vendor = Vendor(wire, told)
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        ask: Any = {"model": "m", "messages": MESSAGES, "tools": C_TOOLS}
        if stream:
            async with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as events:
                async for _ in events:
                    pass
                snapshot = events.current_completion_snapshot
            choice: Any = snapshot.choices[0]
            usage = snapshot.usage
        else:
            completion = await client.chat.completions.create(**ask)
            choice, usage = completion.choices[0], completion.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 7, 18)
        assert usage.completion_tokens_details is not None
        assert choice.finish_reason == told.finish
        message = choice.message
        calls = message.tool_calls or []
        assert [c.id for c in calls] == list(told.call_ids[: len(calls)])
        back: Any = {"role": "assistant", "content": message.content}
        if calls:
            fields = [(c.id, c.function.name, c.function.arguments) for c in calls]
            back["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(json.loads(a), indent=1)}}
                for i, n, a in fields
            ]
        if reasoning := getattr(message, "reasoning_content", None):
            back["reasoning_content"] = reasoning
        after: Any = [{"role": "tool", "tool_call_id": c.id, "content": "r"} for c in calls]
        await client.chat.completions.create(model="m", messages=[*MESSAGES, back, *after], tools=C_TOOLS)
    first, second = vendor.asked
    assert second.messages[: len(first.messages)] == first.messages
    came = second.messages[len(first.messages)]
    assert came.digest == echoed(reply).digest
    assert came.reasoning == reply.reasoning
    assert came.marks == tuple(c.id for c in calls)


async def test_openai_keeps_broken_arguments() -> None:
    wire = ChatWire()
    vendor = Vendor(wire, answer(wire, Reply(calls=(call("Bash", '{"command": "echo', "invalid_arguments"),))))
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        completion = await client.chat.completions.create(model="m", messages=MESSAGES)
    function = (completion.choices[0].message.tool_calls or [])[0].function  # type: ignore[union-attr]
    assert function.arguments == '{"command": "echo'


@pytest.mark.parametrize(("kind", "status"), [*ERRORS, ("overloaded", 529)])
async def test_anthropic_errors(kind: ErrorKind, status: int) -> None:
    vendor = Vendor(AnthropicWire(), refusal=WireError(kind, "prompt is too long: 9 tokens > 8 maximum"))
    async with serve(vendor) as url, anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError, match="9 tokens > 8 maximum") as caught:
            await client.messages.create(model="m", max_tokens=1, messages=MESSAGES)
    assert caught.value.status_code == status


@pytest.mark.parametrize(("kind", "status"), [*ERRORS, ("overloaded", 503)])
async def test_openai_errors(kind: ErrorKind, status: int) -> None:
    vendor = Vendor(ChatWire(), refusal=WireError(kind, "prompt is too long: 9 tokens > 8 maximum"))
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="9 tokens > 8 maximum") as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.status_code == status
    if kind == "context_overflow":
        assert caught.value.code == "context_length_exceeded"


async def test_errors_inside_a_stream_are_raised() -> None:
    broken = WireError("overloaded", "the engine failed; send the request again")
    wire: Any = AnthropicWire()
    vendor = Vendor(wire, answer(wire, Reply("x")), break_stream=broken)
    async with serve(vendor) as url, anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as claude:
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            async with claude.messages.stream(model="m", max_tokens=1, messages=MESSAGES) as events:
                await events.get_final_message()
    wire = ChatWire()
    vendor = Vendor(wire, answer(wire, Reply("x")), break_stream=broken)
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            async for _ in stream:
                pass


async def test_sdk_retries_are_marked() -> None:
    wire = ChatWire()
    vendor = Vendor(wire, answer(wire, Reply("x")), refusal=WireError("overloaded", "later"))
    parsed: list[bool] = []
    original = wire.parse

    def parse(body: Any, headers: Any, target: str) -> Any:
        asked = original(body, headers, target)
        parsed.append(asked.marked_retry)
        return asked

    wire.parse = parse  # type: ignore[method-assign]
    async with serve(vendor) as url, openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=1) as client:
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert parsed == [False, True]
