"""What clients do to a history without meaning it changes nothing, and nothing they send breaks a wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sandlot.chat.messages import Message, ParsedCall, Reply, tools_digest
from sandlot.gateway.wire import WIRES, ChatRequest, Wire, WireError, wire_for
from support.profiles import few
from support.wire_server import answer, call

ANTHROPIC, CHAT = wire_for("/v1/messages"), wire_for("/v1/chat/completions")
ASKED = ChatRequest((), (), "m", False)

Draw = Callable[[st.SearchStrategy[Any]], Any]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
said = words.filter(lambda t: bool(t.strip()))
leaves = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | words
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6)
arguments = st.dictionaries(words, values, max_size=4).filter(lambda a: "__unparsedToolInput" not in a)


@dataclass(frozen=True)
class Say:
    """One assistant turn and what the agent sent after it."""

    text: str
    thought: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    results: tuple[tuple[str, bool], ...]
    user: tuple[str, ...]
    reminder: str


@st.composite
def says(draw: Any) -> Say:
    calls = tuple(draw(st.lists(st.tuples(st.sampled_from(["Bash", "Read", "x"]), arguments), max_size=3)))
    results = tuple((draw(words), draw(st.booleans())) for _ in calls)
    user = tuple(draw(st.lists(said, min_size=0 if calls else 1, max_size=2)))
    return Say(draw(st.just("") | said), draw(st.just("") | said), calls, results, user, draw(st.just("") | said))


histories = st.lists(says(), min_size=1, max_size=3)


def shuffled(draw: Draw, value: dict[str, Any]) -> dict[str, Any]:
    """The same object with its keys in another order, all the way down."""
    keys = draw(st.permutations(list(value)))
    return {k: shuffled(draw, value[k]) if isinstance(value[k], dict) else value[k] for k in keys}


def as_float(draw: Draw, value: Any) -> Any:
    """Some whole numbers written as floats."""
    if isinstance(value, dict):
        return {k: as_float(draw, v) for k, v in value.items()}
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and draw(st.booleans()) else value


def marked(draw: Draw, block: dict[str, Any]) -> dict[str, Any]:
    """A block with or without a cache mark, its keys in any order."""
    extra = {"cache_control": {"type": "ephemeral"}} if draw(st.booleans()) else {}
    keys = draw(st.permutations(list(block | extra)))
    return {k: (block | extra)[k] for k in keys}


def content(draw: Draw, texts: tuple[str, ...]) -> Any:
    """Text blocks as a list; one text as a list or as a string; none as any of the empty forms."""
    if not texts:
        return draw(st.sampled_from(["", None, []]))
    if len(texts) == 1 and draw(st.booleans()):
        return texts[0]
    return [marked(draw, {"type": "text", "text": t}) for t in texts]


def anthropic_body(draw: Draw, history: list[Say]) -> dict[str, Any]:
    """One way in which a client may write this history."""
    header = f"x-anthropic-billing-header: cc_version=2.1; cch={draw(st.integers(0, 99999))};"
    system = [marked(draw, {"type": "text", "text": t}) for t in ("You are.", "Long prompt.")]
    if draw(st.booleans()):
        system.insert(0, {"type": "text", "text": header})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": content(draw, ("fix it x-anthropic-billing-header: cch=1;",))}
    ]
    for n, say in enumerate(history):
        blocks: list[dict[str, Any]] = []
        for i, (name, given_arguments) in enumerate(say.calls):
            sent = as_float(draw, shuffled(draw, given_arguments))
            blocks.append(marked(draw, {"type": "tool_use", "id": f"toolu_{n}_{i}", "name": name, "input": sent}))
        if say.text:
            blocks.insert(draw(st.integers(0, len(blocks))), {"type": "text", "text": say.text})
        if draw(st.booleans()):
            blocks.insert(draw(st.integers(0, len(blocks))), {"type": "text", "text": " \n"})
        if say.thought:
            blocks.insert(0, {"type": "thinking", "thinking": say.thought, "signature": f"sig{n}"})
        messages.append({"role": "assistant", "content": blocks})
        results = []
        for i, (text, failed) in enumerate(say.results):
            block = {"type": "tool_result", "tool_use_id": f"toolu_{n}_{i}", "content": content(draw, (text,))}
            if failed or draw(st.booleans()):
                block["is_error"] = failed
            results.append(marked(draw, block))
        results = draw(st.permutations(results))
        user = [marked(draw, {"type": "text", "text": t}) for t in say.user]
        if len(results) > 1 and draw(st.booleans()):
            messages.append({"role": "user", "content": results[:1]})
            results = results[1:]
        if not results and len(user) == 1 and draw(st.booleans()):
            messages.append({"role": "user", "content": say.user[0]})
        elif results or user:
            messages.append({"role": "user", "content": [*results, *user]})
        if say.reminder:
            messages.append({"role": "system", "content": content(draw, (say.reminder,))})
    tool = {
        "name": "Bash",
        "description": "d",
        "input_schema": shuffled(draw, {"type": "object", "a": {"b": 1, "c": 2}}),
    }
    return {"model": "m", "max_tokens": 9, "system": system, "messages": messages, "tools": [marked(draw, tool)]}


def chat_body(draw: Draw, history: list[Say]) -> dict[str, Any]:
    """One way in which a client may write this history."""
    messages: list[dict[str, Any]] = [
        {"role": draw(st.sampled_from(["system", "developer"])), "content": content(draw, ("You are.",))},
        {"role": "user", "content": content(draw, ("fix it",))},
    ]
    for n, say in enumerate(history):
        message: dict[str, Any] = {"role": "assistant"}
        if say.text:
            message["content"] = content(draw, (say.text,))
        elif draw(st.booleans()):
            message["content"] = draw(st.sampled_from([None, "", [], " \n"]))
        if say.thought:
            message[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = say.thought
        calls = []
        for i, (name, given_arguments) in enumerate(say.calls):
            sent = as_float(draw, shuffled(draw, given_arguments))
            raw = json.dumps(sent, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))
            function = {"name": name, "arguments": "" if not sent and draw(st.booleans()) else raw}
            calls.append({"id": f"call_{n}_{i}", "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        elif draw(st.booleans()):
            message["tool_calls"] = draw(st.sampled_from([None, []]))
        messages.append(shuffled(draw, message))
        results = [
            {"role": "tool", "tool_call_id": f"call_{n}_{i}", "content": content(draw, (text,))}
            for i, (text, _) in enumerate(say.results)
        ]
        messages += draw(st.permutations(results))
        messages += [{"role": "user", "content": content(draw, (t,))} for t in say.user]
    function = {"name": "Bash", "parameters": shuffled(draw, {"type": "object", "a": {"b": 1, "c": 2}})}
    return {"model": "m", "messages": messages, "tools": [{"type": "function", "function": function}]}


def same(a: ChatRequest, b: ChatRequest) -> None:
    assert a.messages == b.messages
    assert [m.digest for m in a.messages] == [m.digest for m in b.messages]
    assert [m.marks for m in a.messages] == [m.marks for m in b.messages]
    assert tools_digest(a.tools) == tools_digest(b.tools)


@few
@given(histories, st.data())
def test_anthropic_writes_one_history_in_many_ways(history: list[Say], data: st.DataObject) -> None:
    bodies = [anthropic_body(data.draw, history) for _ in range(2)]
    one, two = (ANTHROPIC.parse(body, {}) for body in bodies)
    same(one, two)
    calls = [f"toolu_{n}_{i}" for n, say in enumerate(history) for i in range(len(say.calls))]
    assert [m.tool_call_id for m in one.messages if m.role == "tool"] == calls
    assert [m.text for m in one.messages if m.role == "tool"] == [t for say in history for t, _ in say.results]
    shorter = ANTHROPIC.parse(anthropic_body(data.draw, history[:-1]), {})
    assert one.messages[: len(shorter.messages)] == shorter.messages


@few
@given(histories, st.data())
def test_chat_writes_one_history_in_many_ways(history: list[Say], data: st.DataObject) -> None:
    bodies = [chat_body(data.draw, history) for _ in range(2)]
    one, two = (CHAT.parse(body, {}) for body in bodies)
    same(one, two)
    assert [m.text for m in one.messages if m.role == "tool"] == [t for say in history for t, _ in say.results]
    shorter = CHAT.parse(chat_body(data.draw, history[:-1]), {})
    assert one.messages[: len(shorter.messages)] == shorter.messages


any_text = st.text(max_size=20)
statuses = st.sampled_from(["ok", "invalid_arguments", "unclosed", "missing_name", "unknown_tool"])


@st.composite
def replies(draw: Any) -> Reply:
    calls = []
    for _ in range(draw(st.integers(0, 3))):
        status = draw(statuses)
        broken = any_text.map(lambda t: "{" + t)
        calls.append(call(draw(any_text), draw(broken if status == "invalid_arguments" else arguments), status))
    return Reply(draw(any_text), draw(any_text), tuple(calls), draw(st.booleans()))


def echoed(reply: Reply) -> Message:
    calls: tuple[ParsedCall, ...] = tuple(c for c in reply.calls if c.status not in ("unclosed", "missing_name"))
    return Reply(reply.text if reply.text.strip() else "", reply.reasoning, calls).as_message()


@few
@given(replies())
def test_an_answer_read_back_is_the_reply(reply: Reply) -> None:
    """Whatever the policy wrote, the bytes are JSON, and a client that returns it returns what was meant."""
    body = json.loads(ANTHROPIC.body(answer(ANTHROPIC, reply), ASKED))
    back: dict[str, Any] = {"role": "assistant", "content": body["content"]}
    (message,) = ANTHROPIC.parse({"messages": [back]}, {}).messages
    assert message.digest == echoed(reply).digest
    assert message.reasoning == reply.reasoning
    body = json.loads(CHAT.body(answer(CHAT, reply), ASKED))
    (message,) = CHAT.parse({"messages": [body["choices"][0]["message"]]}, {}).messages
    assert message.text == echoed(reply).text
    assert [c.name for c in message.tool_calls] == [c.name for c in echoed(reply).tool_calls]


@few
@given(replies(), st.booleans())
def test_a_stream_is_whole_events(reply: Reply, usage: bool) -> None:
    for wire in WIRES:
        asked = ChatRequest((), (), "m", True, include_usage=usage)
        told = answer(wire, reply)
        raw = wire.head(told.head, asked) + wire.keepalive(told.head, asked) + wire.tail(told, asked)
        assert raw.endswith(b"\n\n")
        for block in raw.decode()[:-2].split("\n\n"):
            *name, data = block.split("\n")
            assert data.startswith("data: ")
            decoded = {} if data == "data: [DONE]" else json.loads(data[6:])
            assert name == ([f"event: {decoded['type']}"] if wire.name in ("anthropic", "responses") else [])


KEYS = (
    *(
        "role",
        "content",
        "type",
        "text",
        "id",
        "name",
        "input",
        "tool_use_id",
        "tool_call_id",
        "tool_calls",
        "function",
    ),
    *("function_call", "custom", "arguments", "source", "data", "thinking", "signature", "is_error", "refusal"),
    *("reasoning", "parameters", "input_schema", "tool", "tool_name", "definition", "title", "defer_loading"),
)
TYPES = (
    *("user", "assistant", "tool", "system", "text", "tool_use", "tool_result", "thinking", "content"),
    *("tool_reference", "tool_addition", "tool_removal", "document", "search_result"),
)
junk = st.recursive(
    leaves | st.sampled_from(TYPES),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            v,
            max_size=5,
        )
    ),
    max_leaves=20,
)
fields = ["messages", "system", "tools", "functions", "stream", "max_tokens", "n", "model", "stream_options"]


def understood_or_refused(wire: Wire, body: Any) -> None:
    """Nothing but a `WireError` that says something comes out."""
    try:
        asked = wire.parse(msgspec.json.decode(msgspec.json.encode(body)), {"x-stainless-retry-count": "²"})
    except WireError as refused:
        error = refused
    else:
        assert all(len(message.digest) == 16 for message in asked.messages)
        assert len(tools_digest(asked.tools)) == 16
        return
    assert error.kind == "invalid_request"
    assert ": " in str(error)


@few
@given(st.dictionaries(st.sampled_from(fields), junk, max_size=5) | junk)
def test_junk_is_understood_or_refused(body: Any) -> None:
    for wire in WIRES:
        understood_or_refused(wire, body)


roles = st.sampled_from(["user", "assistant", "tool", "system", "developer", "function"])


@few
@given(st.lists(st.builds(lambda role, rest: {"role": role, "content": rest}, roles, junk), min_size=1, max_size=4))
def test_junk_messages_are_understood_or_refused(messages: list[Any]) -> None:
    for wire in WIRES:
        understood_or_refused(wire, {"messages": messages})
