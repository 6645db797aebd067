"""OpenAI chat completions: what a request means, and the exact chunks of an answer."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from sandlot.chat.messages import Message, Reply, Tool, ToolCall
from sandlot.gateway.wire import ChatRequest, ErrorKind, Head, WireError
from sandlot.gateway.wire.openai_chat import ChatWire
from support.wire_server import answer, call

WIRE = ChatWire()


def parse(messages: list[Any], **fields: Any) -> ChatRequest:
    return WIRE.parse({"model": "m", "messages": messages, **fields}, {})


def wire_call(call_id: str, name: str = "bash", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """Chunks of a stream that ends with the end mark; nothing but data lines is in it."""
    blocks = raw.decode().strip("\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks]


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from the deltas."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    message[field] = (message.get(field) or "") + delta[field]
            for piece in delta.get("tool_calls", ()):
                if piece["index"] not in calls:
                    assert piece["index"] == len(calls)
                    calls[piece["index"]] = {k: piece[k] for k in ("id", "type")} | {
                        "function": dict(piece["function"])
                    }
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


class TestArguments:
    @pytest.mark.parametrize(
        ("raw", "canonical"),
        [
            ('{"b": 1, "a": "caf\\u00e9"}', {"a": "café", "b": 1}),
            ({"a": 1}, {"a": 1}),
            ("", {}),
            (" ", {}),
            (None, {}),
            ("null", "null"),
            ("[1]", "[1]"),
            ('"s"', '"s"'),
            ('{"s": "say "hi""}', '{"s": "say "hi""}'),
            ('{"command": "echo two"', '{"command": "echo two"'),
            ('{"a": 1} trailing', '{"a": 1} trailing'),
            ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
            ("[" * 5000, "[" * 5000),
            ("\ud800", "\ud800"),
        ],
    )
    def test_broken_history_is_kept_and_never_refused(self, raw: Any, canonical: Any) -> None:
        """One bad call is in every later request: it must go on being understood, as what was written."""
        history = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [wire_call("c1", "edit", raw)]},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: invalid JSON"},
            {"role": "user", "content": "again"},
        ]
        asked = parse(history)
        assert asked.messages[1].tool_calls == (ToolCall("edit", canonical, "c1"),)
        assert [m.role for m in asked.messages] == ["user", "assistant", "tool", "user"]

    @pytest.mark.parametrize("raw", ["", "null", "[1]", '{"command": "echo two"', '{"s": "say "hi""}'])
    def test_broken_arguments_reach_the_agent_as_written(self, raw: str) -> None:
        calls = (call("edit", raw, "invalid_arguments"), call("Raed", {"p": 1}, "unknown_tool"))
        told = answer(WIRE, Reply(calls=calls))
        whole = msgspec.json.decode(WIRE.body(told, REQUEST))["choices"][0]["message"]
        assert [c["function"]["arguments"] for c in whole["tool_calls"]] == [raw, '{"p":1}']
        assert joined(chunks(WIRE.tail(told, REQUEST)))["tool_calls"] == whole["tool_calls"]


class TestToolResults:
    @pytest.mark.parametrize("order", list(itertools.permutations("abc")))
    def test_stand_in_call_order(self, order: tuple[str, ...]) -> None:
        asked = parse(
            [
                {"role": "assistant", "tool_calls": [wire_call(i, f"t{i}") for i in "abc"]},
                *({"role": "tool", "tool_call_id": i, "content": [{"type": "text", "text": i}]} for i in order),
            ]
        )
        assert asked.messages[1:] == tuple(Message("tool", i, tool_call_id=i, tool_name=f"t{i}") for i in "abc")

    def test_result_of_an_unknown_call_is_named(self) -> None:
        with pytest.raises(WireError, match="call_X") as caught:
            parse([{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "call_X", "content": ""}])
        assert caught.value.kind == "invalid_request"

    def test_a_reused_id_belongs_to_the_latest_call(self) -> None:
        def turn(name: str) -> list[dict[str, Any]]:
            calls = {"role": "assistant", "tool_calls": [wire_call("call_0", name)]}
            return [calls, {"role": "tool", "tool_call_id": "call_0", "content": name}]

        assert [m.tool_name for m in parse(turn("one") + turn("two")).messages if m.role == "tool"] == ["one", "two"]

    def test_legacy_functions_pair_by_name(self) -> None:
        asked = parse(
            [
                {"role": "assistant", "content": None, "function_call": {"name": "ls", "arguments": '{"p":"."}'}},
                {"role": "function", "name": "ls", "content": "a.py"},
            ],
            functions=[{"name": "ls", "parameters": {"type": "object"}}],
        )
        assert asked.messages[0].tool_calls == (ToolCall("ls", {"p": "."}),)
        assert asked.messages[1] == Message("tool", "a.py", tool_name="ls")
        assert asked.tools == (Tool("ls", "", {"type": "object"}),)


class TestRequest:
    def test_roles_and_content(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
        asked = parse(
            [
                {"role": "developer", "content": "be good"},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": " \n", "reasoning": "hm", "tool_calls": [wire_call("c")]},
                {"role": "tool", "tool_call_id": "c", "content": None},
                {"role": "system", "content": [{"type": "text", "text": "late"}]},
                {"role": "assistant", "content": None, "reasoning_content": "so", "refusal": "no"},
            ]
        )
        assert asked.messages == (
            Message("system", "be good"),
            Message("user", "a\n[image_url left out: this model reads text only]"),
            Message("assistant", "", "hm", (ToolCall("bash", {}, "c"),)),
            Message("tool", "", tool_call_id="c", tool_name="bash"),
            Message("system", "late"),
            Message("assistant", "no", "so"),
        )
        assert asked.messages[2].marks == ("c",)

    @pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}], ...])
    @pytest.mark.parametrize("role", ["user", "assistant"])
    def test_empty_content_is_one_thing(self, role: Any, content: Any) -> None:
        message = {"role": role} if content is ... else {"role": role, "content": content}
        assert parse([message]).messages == (Message(role),)

    def test_tools_of_every_kind(self) -> None:
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
        tools = [
            {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}},
            {"type": "custom", "custom": {"name": "apply_patch", "description": "p", "format": grammar}},
            {"type": "web_search"},
            {"type": "function", "function": {"name": "bare"}},
        ]
        text = {"type": "string", "description": "Raw text that follows this lark grammar:\nstart: /.+/s"}
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        freeform = Tool("apply_patch", "p", schema, "custom")
        calls = [{"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin Patch"}}]
        asked = parse([{"role": "assistant", "tool_calls": calls}], tools=tools)
        assert asked.tools == (Tool("bash", "d", {"type": "object"}), freeform, Tool("bare"))
        assert asked.messages[0].tool_calls == (ToolCall("apply_patch", {"input": "*** Begin Patch"}, "c"),)

    def test_settings_of_the_agent_change_nothing(self) -> None:
        user = [{"role": "user", "content": "x"}]
        settings: dict[str, Any] = {
            "logprobs": False,
            "top_logprobs": None,
            "stop": ["\n"],
            "logit_bias": {},
            "n": 1,
            "seed": 3,
        }
        assert parse(user, **settings, temperature=0, brand_new=True) == parse(user)
        with pytest.raises(WireError, match="n: only one answer"):
            parse(user, n=2)

    def test_fields_from_headers_and_body(self) -> None:
        user = [{"role": "user", "content": "x"}]
        tools = [{"type": "function", "function": {"name": "bash"}}]
        body = {"model": "m", "messages": user, "tools": tools, "max_tokens": 7}
        main = WIRE.parse(body, {"x-stainless-retry-count": "0", "x-session-id": "s"})
        assert (main.branch, main.marked_retry, main.max_tokens, main.include_usage) == ("main", False, 7, False)
        child = WIRE.parse(
            body | {"max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}},
            {"x-stainless-retry-count": "1", "x-parent-session-id": "p", "x-session-id": "s2"},
        )
        assert (child.branch, child.marked_retry, child.max_tokens) == ("subagent:s2", True, 9)
        assert child.include_usage
        assert child.stream
        assert parse(user).branch == "side"

    @pytest.mark.parametrize(
        ("body", "where"),
        [
            (None, "body"),
            ({"messages": None}, "messages"),
            ({"messages": [7]}, r"messages\.0"),
            ({"messages": [{"role": "robot", "content": ""}]}, r"messages\.0\.role"),
            ({"messages": [{"role": "user", "content": 5}]}, r"messages\.0\.content"),
            ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, r"messages\.0\.tool_calls"),
            ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, r"tool_calls\.0\.function"),
            ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, "max_tokens"),
            ({"messages": [{"role": "user", "content": "x"}], "tools": "all"}, "tools"),
        ],
    )
    def test_nonsense_is_refused_by_name(self, body: Any, where: str) -> None:
        with pytest.raises(WireError, match=where):
            WIRE.parse(body, {})


HEAD = Head("id-1", "m", 1, 1)
REQUEST = parse([{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True})
PLAIN = parse([{"role": "user", "content": "x"}], stream=True)
READS = tuple(call("read", {"path": f"{n}.py"}) for n in (1, 2, 3))


class TestFrames:
    @pytest.mark.parametrize("reply", [Reply("hi"), Reply("hi", "hm", READS), Reply(calls=READS[:1]), Reply("", "hm")])
    def test_the_stream_is_the_whole_answer(self, reply: Reply) -> None:
        told = answer(WIRE, reply)
        stream = chunks(WIRE.head(told.head, REQUEST) + WIRE.keepalive(told.head, REQUEST) + WIRE.tail(told, REQUEST))
        whole = msgspec.json.decode(WIRE.body(told, REQUEST))
        choice = whole["choices"][0]
        message = {k: v for k, v in choice["message"].items() if k not in ("role", "refusal")}
        assert joined(stream) == message | {"content": message["content"] or None}
        assert stream[0]["choices"][0]["delta"]["role"] == "assistant"
        assert stream[1]["choices"][0]["delta"] == {}
        assert stream[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert choice["finish_reason"] == ("tool_calls" if reply.calls else "stop")
        assert stream[-1]["choices"] == []
        assert stream[-1]["usage"] == whole["usage"]
        assert whole["usage"]["total_tokens"] == 18
        assert None not in whole["usage"].values()
        assert choice["message"]["content"] == (reply.text or (None if reply.calls else ""))

    def test_usage_only_where_asked_for(self) -> None:
        told = answer(WIRE, Reply("hi"))
        assert not any("usage" in chunk for chunk in chunks(WIRE.head(told.head, PLAIN) + WIRE.tail(told, PLAIN)))

    @pytest.mark.parametrize("finish", ["length", "stop", "tool_calls"])
    @pytest.mark.parametrize("truncated", [True, False])
    @pytest.mark.parametrize("before", [(), READS[:1]])
    def test_a_cut_call_is_not_sent(self, finish: str, before: tuple[Any, ...], truncated: bool) -> None:
        """Whatever the engine and the parser say of the end: an unclosed call is a cut turn."""
        cut = call("write_file", {"path": "/w/a.py", "content": "def f():\n    retu"}, "unclosed")
        told = answer(WIRE, Reply("so", calls=(*before, cut), truncated=truncated), finish=finish)
        choice = msgspec.json.decode(WIRE.body(told, REQUEST))["choices"][0]
        stream = chunks(WIRE.tail(told, PLAIN))
        assert stream[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
        assert len(choice["message"].get("tool_calls", ())) == len(joined(stream).get("tool_calls", ())) == len(before)
        assert b"write_file" not in WIRE.body(told, REQUEST) + WIRE.tail(told, PLAIN)

    def test_escapes_that_are_no_unicode_go_out_as_they_came(self) -> None:
        told = answer(WIRE, Reply(calls=(call("bash", {"a": "\ud83d", "n": 10**30}),)))
        raw = msgspec.json.decode(WIRE.body(told, REQUEST))["choices"][0]["message"]["tool_calls"][0]["function"][
            "arguments"
        ]
        assert raw == '{"a":"\\ud83d","n":1000000000000000000000000000000}'

    @pytest.mark.parametrize(
        ("kind", "status", "code"),
        [
            ("invalid_request", 400, None),
            ("context_overflow", 400, "context_length_exceeded"),
            ("authentication", 401, "invalid_api_key"),
            ("budget", 403, "insufficient_quota"),
            ("not_found", 404, "not_found"),
            ("too_large", 413, "request_too_large"),
            ("overloaded", 503, "overloaded"),
        ],
    )
    def test_errors(self, kind: ErrorKind, status: int, code: str | None) -> None:
        error = WireError(kind, "why and what to do")
        got, body = WIRE.error(error)
        decoded = msgspec.json.decode(body)
        assert got == status
        assert set(decoded["error"]) == {"message", "type", "param", "code"}
        assert (decoded["error"]["message"], decoded["error"]["code"]) == ("why and what to do", code)
        assert WIRE.error_event(error, HEAD, REQUEST) == b"data: " + body + b"\n\n"

    def test_a_freeform_tool_is_called_with_raw_text(self) -> None:
        patch = "*** Begin Patch\n*** Add File: a.txt\n+hi\n*** End Patch"
        tools = [{"type": "custom", "custom": {"name": "apply_patch", "description": "d"}}]
        asked = parse([{"role": "user", "content": "x"}], tools=tools)
        told = answer(WIRE, Reply(calls=(call("apply_patch", {"input": patch}), *READS[:1])))
        message = msgspec.json.decode(WIRE.body(told, asked))["choices"][0]["message"]
        custom, function = message["tool_calls"]
        assert custom == {"id": told.call_ids[0], "type": "custom", "custom": {"name": "apply_patch", "input": patch}}
        assert function["type"] == "function"
        deltas = [c["choices"][0]["delta"] for c in chunks(WIRE.tail(told, asked)) if c["choices"]]
        pieces = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
        assert [p.get("custom", {}).get("input") for p in pieces] == ["", patch, None, None]
        (back,) = parse([message]).messages
        assert back.tool_calls[0] == ToolCall("apply_patch", {"input": patch}, told.call_ids[0])
