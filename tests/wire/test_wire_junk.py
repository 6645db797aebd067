"""OpenAI Responses and Google: answers read back are the reply, and nothing a client sends breaks the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.chat.continuity import Continuity
from sandlot.chat.messages import ParsedCall, Reply, tools_digest
from sandlot.gateway.wire import ChatRequest, WireError, wire_for
from support.profiles import few
from support.wire_server import TURN, answer

RESPONSES, GOOGLE = wire_for("/v1/responses"), wire_for("/v1beta/models/m:generateContent")
CUSTOM = RESPONSES.parse({"input": "x", "tools": [{"type": "custom", "name": "x"}]}, {})
PLAIN = ChatRequest((), (), "m", False)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
leaves = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | words
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6)
objects = st.dictionaries(words, values, max_size=4)
calls = st.one_of(
    st.builds(lambda n, a: ParsedCall(n, a, "", "ok"), st.sampled_from(["Bash", "x"]), objects),
    st.builds(lambda a: ParsedCall("Bash", a, a, "invalid_arguments"), words.map(lambda t: "{" + t + ":")),
    st.builds(lambda a: ParsedCall("x", a, a, "unclosed"), words),
)
replies = st.builds(Reply, words, words, st.lists(calls, max_size=3).map(tuple))


@few
@given(replies)
def test_an_answer_read_back_is_the_reply(reply: Reply) -> None:
    sent = tuple(c for c in reply.calls if c.status != "unclosed")
    meant = Reply(reply.text if reply.text.strip() else "", reply.reasoning, sent).as_message()
    items = json.loads(RESPONSES.body(answer(RESPONSES, reply), PLAIN))["output"]
    (message,) = RESPONSES.parse({"input": items}, {}).messages
    assert message.digest == meant.digest
    assert message.reasoning == reply.reasoning
    content = json.loads(GOOGLE.body(answer(GOOGLE, reply), PLAIN))["candidates"][0]["content"]
    (message,) = GOOGLE.parse({"contents": [content]}, {}).messages
    assert message.digest == meant.digest
    assert message.reasoning == reply.reasoning


@few
@given(replies)
def test_a_freeform_call_carries_a_text_whatever_the_policy_wrote(reply: Reply) -> None:
    items = json.loads(RESPONSES.body(answer(RESPONSES, reply), CUSTOM))["output"]
    custom = [item for item in items if item["type"] == "custom_tool_call"]
    assert len(custom) == sum(c.name == "x" and c.status == "ok" for c in reply.calls)
    assert all(isinstance(item["input"], str) for item in custom)


OWN = RESPONSES.parse({"input": "x", "tools": [{"type": t} for t in ("local_shell", "shell", "apply_patch")]}, {})
held = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "commands": st.lists(words, max_size=2) | values,
            "command": st.lists(words, max_size=2) | values,
            "timeout_ms": st.integers() | st.none() | values,
            "env": st.dictionaries(words, words, max_size=2) | values,
            "user": words | st.none(),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["create_file", "update_file", "delete_file", ""]), "path": words},
        optional={"diff": words | values},
    ),
    objects,
)


@few
@given(st.sampled_from([tool.name for tool in OWN.tools]), held)
def test_a_shells_or_patchs_call_read_back_is_the_turn(name: str, arguments: dict[str, Any]) -> None:
    reply = Reply(calls=(ParsedCall(name, arguments, "", "ok"),))
    told = answer(RESPONSES, reply)
    (item,) = json.loads(RESPONSES.body(told, OWN))["output"]
    assert item["type"] in (f"{name}_call", "function_call")
    (message,) = RESPONSES.parse({"input": [item]}, {}).messages
    known = Continuity()
    said = replace(reply.as_message(told.call_ids), marks=told.call_ids)
    known.record(known.match(OWN.messages, OWN.tools), TURN, said)
    found = known.match((*OWN.messages, message), OWN.tools)
    assert (found.turn, found.fork) == (TURN, "")


KEYS = (
    *("role", "content", "type", "text", "id", "name", "input", "output", "call_id", "arguments", "summary"),
    *("encrypted_content", "namespace", "tools", "execution", "parameters", "format", "instructions", "stream"),
    *("contents", "parts", "functionCall", "function_call", "functionResponse", "response", "args", "thought"),
    *("thoughtSignature", "systemInstruction", "functionDeclarations", "parametersJsonSchema", "generationConfig"),
    *("maxOutputTokens", "max_output_tokens", "generateContentRequest", "inlineData"),
    *("action", "operation", "outcome", "stdout", "environment", "skills", "status", "exit_code"),
)
TYPES = (
    *("user", "assistant", "model", "message", "reasoning", "function_call", "function_call_output", "custom"),
    *("custom_tool_call", "custom_tool_call_output", "tool_search_call", "tool_search_output", "tool_search"),
    *("namespace", "function", "client", "input_text", "item_reference", "local", "failed"),
    *("shell", "shell_call", "shell_call_output", "apply_patch", "apply_patch_call", "apply_patch_call_output"),
    *("local_shell", "local_shell_call", "local_shell_call_output"),
)
junk = st.recursive(
    leaves | st.sampled_from(TYPES),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(KEYS), v, max_size=5),
    max_leaves=20,
)
objects_of_junk = st.dictionaries(st.sampled_from(KEYS), junk, max_size=5)


@few
@given(st.lists(objects_of_junk, max_size=4), st.lists(objects_of_junk, max_size=2) | junk, objects_of_junk)
@pytest.mark.parametrize("name", ["responses", "google"])
def test_junk_is_understood_or_refused(name: str, listed: list[Any], tools: Any, rest: dict[str, Any]) -> None:
    wire = RESPONSES if name == "responses" else GOOGLE
    body = {**rest, "input": listed, "contents": listed, "tools": tools}
    try:
        asked = wire.parse(msgspec.json.decode(msgspec.json.encode(body)), {}, "/v1beta/models/m:generateContent")
    except WireError as refused:
        error = refused
    else:
        assert all(len(message.digest) == 16 for message in asked.messages)
        assert len(tools_digest(asked.callable)) == 16
        return
    assert error.kind == "invalid_request"
    assert ": " in str(error)
