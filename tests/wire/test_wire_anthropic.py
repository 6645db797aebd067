"""Anthropic Messages: what a request means, and the exact frames of an answer."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from sandlot.chat.messages import Message, Reply, Tool, ToolCall
from sandlot.gateway.wire import ChatRequest, ErrorKind, Head, WireError
from sandlot.gateway.wire.anthropic import AnthropicWire
from support.wire_server import answer, call

WIRE = AnthropicWire()
HEADER = "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=sdk-cli;"


def parse(messages: list[Any], **fields: Any) -> ChatRequest:
    return WIRE.parse({"model": "m", "max_tokens": 10, "messages": messages, **fields}, {})


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


def use(call_id: str, name: str = "Bash", arguments: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if arguments is None else arguments}


def result(call_id: str, content: Any = "", **extra: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **extra}


def frames(raw: bytes) -> list[dict[str, Any]]:
    """Events of a stream; each one's name must be its type."""
    found = []
    for block in raw.decode().strip("\n").split("\n\n"):
        name, data = block.split("\n")
        decoded = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {decoded['type']}"
        found.append(decoded)
    return found


class TestToolResults:
    CALLS = ("tu_A", "tu_B", "tu_C")

    @pytest.mark.parametrize("order", list(itertools.permutations(CALLS)))
    @pytest.mark.parametrize("split", [False, True])
    def test_stand_in_call_order_with_their_ids(self, order: tuple[str, ...], split: bool) -> None:
        """Clients send them as they end, in one user message or several."""
        blocks = [result(i, f"out {i}") for i in order]
        users = [[b] for b in blocks] if split else [blocks]
        assistant = {"role": "assistant", "content": [use(i, f"Tool{i[-1]}") for i in self.CALLS]}
        asked = parse([{"role": "user", "content": "go"}, assistant, *({"role": "user", "content": u} for u in users)])
        assert asked.messages[2:] == tuple(
            Message("tool", f"out {i}", tool_call_id=i, tool_name=f"Tool{i[-1]}") for i in self.CALLS
        )

    @pytest.mark.parametrize("messages_before", [[], [{"role": "assistant", "content": [use("tu_A")]}]])
    def test_result_of_an_unknown_call_is_named(self, messages_before: list[Any]) -> None:
        with pytest.raises(WireError, match="tu_X") as caught:
            parse([{"role": "user", "content": "go"}, *messages_before, {"role": "user", "content": [result("tu_X")]}])
        assert caught.value.kind == "invalid_request"
        assert WIRE.error(caught.value)[0] == 400

    @pytest.mark.parametrize(
        "block", [{"type": "tool_result", "content": "x"}, result("", "x"), {"type": "tool_result", "id": "tu_A"}]
    )
    def test_an_empty_call_id_is_refused(self, block: dict[str, Any]) -> None:
        with pytest.raises(WireError, match=r"messages\.1\.content\.0\.tool_use_id"):
            parse([{"role": "assistant", "content": [use("tu_A")]}, {"role": "user", "content": [block]}])

    def test_a_great_many_results_find_their_calls_at_once(self) -> None:
        compared = 0

        class Id(str):
            __slots__ = ()
            __hash__ = str.__hash__

            def __eq__(self, other: object) -> bool:
                nonlocal compared
                compared += 1
                return str.__eq__(self, str(other))

        ids = [Id(f"c{k}") for k in range(1000)]
        calls, results = [use(i) for i in ids], [result(Id(i), i) for i in reversed(ids)]
        asked = parse([{"role": "assistant", "content": calls}, {"role": "user", "content": results}])
        assert [m.tool_call_id for m in asked.messages[1:]] == ids
        assert compared < 20_000

    def test_calls_of_one_id_get_their_results_in_order(self) -> None:
        calls, results = [use("c", "A"), use("c", "B")], [result("c", "a"), result("c", "b"), result("c", "again")]
        asked = parse([{"role": "assistant", "content": calls}, {"role": "user", "content": results}])
        assert [(m.tool_name, m.text) for m in asked.messages[1:]] == [("A", "a"), ("B", "b"), ("B", "again")]

    def test_a_late_result_belongs_to_its_own_call(self) -> None:
        asked = parse(
            [
                {"role": "assistant", "content": [use("a", "Agent")]},
                {"role": "user", "content": "meanwhile"},
                {"role": "assistant", "content": [use("b")]},
                {"role": "user", "content": [result("b", "B"), result("a", "A")]},
            ]
        )
        assert [(m.tool_call_id, m.tool_name) for m in asked.messages[-2:]] == [("a", "Agent"), ("b", "Bash")]

    def test_content_of_every_form(self) -> None:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        contents = [
            "",
            None,
            [],
            [text("a"), text("b")],
            [text("a"), image],
            [{"type": "tool_reference", "tool_name": "T"}],
        ]
        asked = parse(
            [
                {"role": "assistant", "content": [use(f"c{i}") for i in range(len(contents))]},
                {"role": "user", "content": [result(f"c{i}", c) for i, c in enumerate(contents)]},
            ]
        )
        left_out = "left out: this model reads text only]"
        texts = [m.text for m in asked.messages[1:]]
        assert texts == ["", "", "", "a\nb", f"a\n[image {left_out}", "The tool T is available."]

    def test_text_beside_results_follows_them(self) -> None:
        content = [text("first"), result("c", "out", is_error=True), text("last")]
        asked = parse([{"role": "assistant", "content": [use("c")]}, {"role": "user", "content": content}])
        assert asked.messages[1:] == (
            Message("tool", "out", tool_call_id="c", tool_name="Bash", is_error=True),
            Message("user", "first\nlast"),
        )


class TestSystem:
    REMINDER = "<system-reminder>date</system-reminder>"

    def test_entries_inside_messages_stay_at_their_place(self) -> None:
        """What follows must not move the start of the prompt: the second request begins with all of the first."""
        marked = {"role": "system", "content": [text(self.REMINDER, cache_control={"type": "ephemeral"})]}
        plain = {"role": "system", "content": self.REMINDER, "output_config": {"effort": "high"}}
        start = [{"role": "user", "content": "fix it"}]
        first = parse([*start, marked], system=[text("base")])
        more = [{"role": "assistant", "content": [text("done")]}, {"role": "system", "content": [text("again")]}]
        second = parse([*start, plain, *more], system="base")
        system = Message("system", self.REMINDER)
        assert first.messages == (Message("system", "base"), Message("user", "fix it"), system)
        assert second.messages == (*first.messages, Message("assistant", "done"), Message("system", "again"))

    @pytest.mark.parametrize("form", ["block", "string", "joined"])
    def test_only_the_leading_telemetry_line_is_left_out(self, form: str) -> None:
        prompt = "You are an agent."

        def system(header: str) -> Any:
            if form == "block":
                return [text(header), text(prompt, cache_control={"type": "ephemeral"})]
            return f"{header}\n{prompt}" if form == "string" else [text(f"{header}\n{prompt}")]

        start = [{"role": "user", "content": HEADER}]
        first = parse(start, system=system(f"{HEADER} cch=11111;"))
        later = [{"role": "assistant", "content": [use("c")]}, {"role": "user", "content": [result("c", HEADER)]}]
        second = parse([*start, *later], system=system(f"{HEADER} cch=22222;"))
        assert first.messages == (Message("system", prompt), Message("user", HEADER))
        assert second.messages[:2] == first.messages
        assert second.messages[3].text == HEADER

    def test_the_same_words_elsewhere_stay(self) -> None:
        asked = parse([{"role": "user", "content": "x"}], system=[text("You are."), text(HEADER)])
        assert asked.messages[0].text == f"You are.\n{HEADER}"
        inside = parse([{"role": "system", "content": HEADER}, {"role": "user", "content": "x"}])
        assert inside.messages[0] == Message("system", HEADER)

    @pytest.mark.parametrize("system", [None, "", [], [text(HEADER)], [text("")]])
    def test_an_empty_prompt_is_no_message(self, system: Any) -> None:
        assert parse([{"role": "user", "content": "x"}], system=system).messages == (Message("user", "x"),)


class TestAssistant:
    def test_marks_are_call_ids_and_signatures(self) -> None:
        blocks = [
            {"type": "thinking", "thinking": "hm", "signature": "sig"},
            {"type": "redacted_thinking", "data": "zzz"},
            text(" \n"),
            use("tu_A", arguments={"x": 5000.0}),
            text("said"),
        ]
        (message,) = parse([{"role": "assistant", "content": blocks}]).messages
        assert message == Message("assistant", "said", "hm", (ToolCall("Bash", {"x": 5000}, "tu_A"),))
        assert message.marks == ("sig", "tu_A")

    def test_text_position_and_blank_text_do_not_count(self) -> None:
        calls = [use("a"), use("b")]
        forms = [[text("t"), *calls], [*calls, text("t")], [calls[0], text("t"), text("  "), calls[1]]]
        parsed = [parse([{"role": "assistant", "content": f}]).messages[0] for f in forms]
        assert all(m == parsed[0] and m.digest == parsed[0].digest for m in parsed)

    @pytest.mark.parametrize("raw", ['{"command": "echo two"', "[1]", "null", "not json", '{"s": "say "hi""}', ""])
    def test_the_wrapper_of_broken_arguments_gives_the_raw_text(self, raw: str) -> None:
        wrapped = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
        (message,) = parse([{"role": "assistant", "content": [use("a", arguments=wrapped)]}]).messages
        assert message.tool_calls[0].arguments == raw

    @pytest.mark.parametrize("content", ["", None, [], [text("")], [text(" \n")]])
    def test_empty_content_is_one_thing(self, content: Any) -> None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        assert parse(messages).messages[1] == Message("assistant")


class TestRequest:
    def test_fields(self) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 5}
        tools = [
            {"name": "Bash", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}},
            {"name": "Later", "defer_loading": True, "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "brand_new_tool"},
        ]
        unknown = {"context_management": {"edits": []}, "brand_new_field": [1], "tool_choice": {"type": "any"}}
        asked = WIRE.parse(body | unknown | {"tools": tools}, {"x-stainless-retry-count": "2"})
        assert asked.tools == (Tool("Bash", "d", {"type": "object"}),)
        assert (asked.model, asked.stream, asked.max_tokens) == ("m", True, 5)
        assert (asked.branch, asked.marked_retry) == ("main", True)
        first = WIRE.parse(body, {"x-stainless-retry-count": "0"})
        assert (first.branch, first.marked_retry) == ("side", False)
        assert WIRE.parse(body, {"x-claude-code-agent-id": "a1"}).branch == "subagent:a1"

    def test_tools_that_are_known_by_type_have_a_schema(self) -> None:
        """The client runs them, so the model must be told of them; what the vendor runs is left out."""
        types = {
            "bash": "bash_20250124",
            "str_replace_based_edit_tool": "text_editor_20250728",
            "memory": "memory_20250818",
            "web_fetch": "web_fetch_20250910",
            "code_execution": "code_execution_20250825",
        }
        tools = parse(
            [{"role": "user", "content": "x"}], tools=[{"type": t, "name": name} for name, t in types.items()]
        ).tools
        assert [tool.name for tool in tools] == ["bash", "str_replace_based_edit_tool", "memory"]
        assert list(tools[0].parameters["properties"]) == ["command", "restart"]
        for tool in tools:
            assert tool.description
            assert set(tool.parameters["required"]) <= tool.parameters["properties"].keys()
        own = {"type": "bash_20250124", "name": "bash", "input_schema": {"type": "object"}}
        assert parse([{"role": "user", "content": "x"}], tools=[own]).tools == (Tool("bash", "", {"type": "object"}),)

    def test_deferred_tools_are_told_where_a_search_finds_them(self) -> None:
        own = {"name": "Own", "input_schema": {}}
        late = [{"name": n, "description": "d", "input_schema": {}, "defer_loading": True} for n in ("Late", "Never")]
        found = result("c", [{"type": "tool_reference", "tool_name": "Late"}, text("loaded")])
        history = [{"role": "assistant", "content": [use("c", "Own")]}, {"role": "user", "content": [found]}]
        before, after = parse(history[:1], tools=[own, *late]), parse(history, tools=[own, *late])
        assert before.tools == after.tools == (Tool("Own"),)
        assert (before.found, after.found) == ((), (Tool("Late", "d"),))
        assert after.messages[1].text == '[{"name":"Late","description":"d","parameters":{}}]\nloaded'
        vendors = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
        assert [t.name for t in parse(history, tools=[own, *late, vendors]).tools] == ["Own", "Late", "Never"]

    def test_tools_that_come_and_go_are_told_there(self) -> None:
        late = {"name": "Late", "input_schema": {}, "defer_loading": True}
        changes = [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Late"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**late, "name": "New"}}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Late"}},
        ]
        asked = parse([{"role": "user", "content": "go"}, {"role": "system", "content": changes}], tools=[late])
        assert (asked.tools, asked.found) == ((), (Tool("Late"), Tool("New")))
        told = [f'[{{"name":"{name}","description":"","parameters":{{}}}}]' for name in ("Late", "New")]
        assert asked.messages[1].text == "\n".join([*told, "The tool Late is no longer available."])

    def test_texts_of_every_form_are_read(self) -> None:
        inner = [text("inner"), {"type": "image"}]
        found = {"type": "search_result", "title": "T", "source": "http://s", "content": inner}
        held = {"type": "document", "title": "D", "context": "C", "source": {"type": "content", "content": inner}}
        (message,) = parse([{"role": "user", "content": [found, held]}]).messages
        read = "inner\n[image left out: this model reads text only]"
        assert message.text == f"T\nhttp://s\n{read}\nD\nC\n{read}"

    def test_unknown_blocks_become_notes(self) -> None:
        document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}}
        pdf = {"type": "document", "source": {"type": "base64", "data": "AA"}}
        content = [text("a"), document, pdf, {"type": "image"}, {"type": "brand_new"}, {}]
        (message,) = parse([{"role": "user", "content": content}]).messages
        notes = [f"[{k} left out: this model reads text only]" for k in ("document", "image", "brand_new", "block")]
        assert message.text == "\n".join(["a", "plain", *notes])

    @pytest.mark.parametrize(
        ("body", "where"),
        [
            ([], "body"),
            ({}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": ["x"]}, r"messages\.0"),
            ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\.0\.role"),
            ({"messages": [{"role": "user", "content": 5}]}, r"messages\.0\.content"),
            ({"messages": [{"role": "user", "content": [5]}]}, r"messages\.0\.content\.0"),
            ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
            ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
            ({"messages": [{"role": "user", "content": "x"}], "system": 5}, "system"),
            ({"messages": [{"role": "user", "content": "x"}], "compaction": {}}, "compaction: histories are not"),
        ],
    )
    def test_nonsense_is_refused_by_name(self, body: Any, where: str) -> None:
        with pytest.raises(WireError, match=where):
            WIRE.parse(body, {})


HEAD = Head("id-1", "m", 1, 1)
REQUEST = parse([{"role": "user", "content": "x"}], stream=True)
READS = tuple(call("Read", {"path": f"{n}.py"}) for n in (1, 2, 3))


class TestFrames:
    def test_parallel_calls_are_blocks_of_their_own(self) -> None:
        """start, deltas, stop of one block before the next starts; indices without a gap; equal to the whole body."""
        reply = Reply("I read three.", "think first", READS)
        told = answer(WIRE, reply)
        events = frames(WIRE.head(told.head, REQUEST) + WIRE.tail(told, REQUEST))
        assert [e["type"] for e in events[:2]] == ["message_start", "ping"]
        assert events[0]["message"]["usage"]["input_tokens"] == 11
        assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        assert events[-2]["usage"]["output_tokens"] == 7
        blocks: list[dict[str, Any]] = []
        inside: int | None = None
        for e in events[2:-2]:
            if e["type"] == "content_block_start":
                assert inside is None
                assert e["index"] == len(blocks)
                inside = e["index"]
                blocks.append(dict(e["content_block"]))
                assert not e["content_block"].get("input")
                continue
            assert e["index"] == inside
            if e["type"] == "content_block_stop":
                inside = None
                continue
            delta = dict(e["delta"])
            kind = delta.pop("type")
            ((field, piece),) = delta.items()
            assert kind in ("thinking_delta", "signature_delta", "text_delta", "input_json_delta")
            blocks[-1][field] = blocks[-1].get(field, "") + piece
        assert inside is None
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = msgspec.json.decode(block.pop("partial_json"))
        whole = msgspec.json.decode(WIRE.body(told, REQUEST))
        assert blocks == whole["content"]
        assert [b["type"] for b in blocks] == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
        assert len({b["id"] for b in blocks[2:]}) == 3
        assert blocks[0]["signature"] == told.signature
        assert whole["stop_reason"] == "tool_use"

    @pytest.mark.parametrize("raw", ['{"command": "echo two"', "[1]", "null", "rm -rf"])
    def test_broken_arguments_reach_the_agent(self, raw: str) -> None:
        told = answer(
            WIRE, Reply(calls=(call("Bash", raw, "invalid_arguments"), call("Raed", {"p": 1}, "unknown_tool")))
        )
        deltas = [e["delta"] for e in frames(WIRE.tail(told, REQUEST)) if e["type"] == "content_block_delta"]
        assert [d["partial_json"] for d in deltas] == [raw, '{"p":1}']
        content = msgspec.json.decode(WIRE.body(told, REQUEST))["content"]
        assert content[0]["input"] == {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
        assert (content[1]["name"], content[1]["input"]) == ("Raed", {"p": 1})
        (message,) = parse([{"role": "assistant", "content": content}]).messages
        assert message.digest == told.reply.as_message().digest

    @pytest.mark.parametrize("finish", ["length", "stop", "tool_calls"])
    @pytest.mark.parametrize("truncated", [True, False])
    @pytest.mark.parametrize("before", [(), READS[:1]])
    def test_a_cut_call_is_not_sent(self, finish: str, before: tuple[Any, ...], truncated: bool) -> None:
        """Whatever the engine and the parser say of the end: an unclosed call is a cut turn."""
        cut = call("write_file", {"path": "/w/a.py", "content": "def f():\n    retu"}, "unclosed")
        told = answer(WIRE, Reply("so", calls=(*before, cut), truncated=truncated), finish=finish)
        raw = WIRE.tail(told, REQUEST)
        whole = msgspec.json.decode(WIRE.body(told, REQUEST))
        assert b"write_file" not in raw
        assert b"write_file" not in WIRE.body(told, REQUEST)
        assert frames(raw)[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
        assert [b["type"] for b in whole["content"]] == ["text", *("tool_use" for _ in before)]

    def test_a_call_without_a_name_is_no_call(self) -> None:
        told = answer(WIRE, Reply("<tool_call></tool_call>", calls=(call("", "", "missing_name"),)))
        whole = msgspec.json.decode(WIRE.body(told, REQUEST))
        assert whole["stop_reason"] == "end_turn"
        assert [b["type"] for b in whole["content"]] == ["text"]

    @pytest.mark.parametrize(
        ("kind", "status", "type"),
        [
            ("invalid_request", 400, "invalid_request_error"),
            ("context_overflow", 400, "invalid_request_error"),
            ("authentication", 401, "authentication_error"),
            ("budget", 403, "permission_error"),
            ("not_found", 404, "not_found_error"),
            ("too_large", 413, "request_too_large"),
            ("overloaded", 529, "overloaded_error"),
        ],
    )
    def test_errors(self, kind: ErrorKind, status: int, type: str) -> None:
        error = WireError(kind, "prompt is too long: 5 tokens > 4 maximum")
        shape = {"type": "error", "error": {"type": type, "message": str(error)}}
        got, body = WIRE.error(error)
        assert (got, msgspec.json.decode(body)) == (status, shape)
        assert frames(WIRE.error_event(error, HEAD, REQUEST)) == [shape]

    def test_count(self) -> None:
        assert msgspec.json.decode(WIRE.count_body(42)) == {"input_tokens": 42}
