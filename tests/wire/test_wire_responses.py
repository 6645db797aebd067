"""OpenAI Responses requests in canonical form, and the order of the events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sandlot.chat.messages import Message, Reply, Tool, ToolCall
from sandlot.gateway.wire import ChatRequest, WireError, minted
from sandlot.gateway.wire.base import Stored
from sandlot.gateway.wire.responses import ResponsesWire
from support.wire_server import answer, call

WIRE = ResponsesWire()
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
EXEC = {"type": "function", "name": "exec", "description": "d", "parameters": SCHEMA, "strict": False}


def parse(items: Any, **body: Any) -> ChatRequest:
    return WIRE.parse({"model": "m", "input": items, **body}, {})


def said(text: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def thought(text: str, mark: str = "E1") -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"type": "reasoning", "summary": summary, "content": None, "encrypted_content": mark}


def called(call_id: str, arguments: str = '{"cmd":"ls"}', **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "exec", "arguments": arguments, **more}


def output(call_id: str, text: Any = "r") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


class TestInput:
    def test_a_text_is_one_user_message(self) -> None:
        asked = parse("go", instructions="Be brief.", max_output_tokens=7, stream=True)
        assert asked.messages == (Message("system", "Be brief."), Message("user", "go"))
        assert (asked.max_tokens, asked.stream, asked.branch) == (7, True, "side")

    @pytest.mark.parametrize(
        "content",
        [
            "hi\nyou",
            [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "you"}],
            [{"type": "input_text", "text": "hi\nyou"}],
        ],
    )
    @pytest.mark.parametrize("bare", [True, False])
    def test_content_is_a_text_or_parts(self, content: Any, bare: bool) -> None:
        item = {"role": "user", "content": content} | ({} if bare else {"type": "message", "id": "msg_1"})
        developer = {"type": "message", "role": "developer", "content": "d"}
        assert parse([developer, item]).messages == (Message("system", "d"), Message("user", "hi\nyou"))

    def test_a_turn_is_one_message(self) -> None:
        items = [thought("hm", "E1"), said([{"type": "output_text", "text": "I look."}]), called("c1"), called("c2")]
        asked = parse([*items, output("c2", "two"), output("c1", [{"type": "input_text", "text": "one"}])])
        calls = (ToolCall("exec", {"cmd": "ls"}, "c1"), ToolCall("exec", {"cmd": "ls"}, "c2"))
        turn, first, second = asked.messages
        assert turn == Message("assistant", "I look.", "hm", calls)
        assert turn.marks == ("E1", "c1", "c2")
        assert (first.text, second.text) == ("one", "two")
        assert first.tool_name == "exec"

    def test_where_one_turn_ends_and_the_next_begins(self) -> None:
        cut = parse([said("abc"), said("recovered")]).messages
        assert [m.text for m in cut] == ["abc", "recovered"]
        thoughts = parse([thought("a", "E1"), thought("b", "E2"), said("x")]).messages
        assert [(m.reasoning, m.text, m.marks) for m in thoughts] == [("a", "", ("E1",)), ("b", "x", ("E2",))]
        (late,) = parse([said("before"), called("c"), said("after")]).messages
        assert (late.text, len(late.tool_calls)) == ("before\nafter", 1)

    @pytest.mark.parametrize("kept", [1, 2])
    @pytest.mark.parametrize("ids", [True, False])
    def test_what_is_kept_of_a_cut_answer_is_no_part_of_the_next(self, kept: int, ids: bool) -> None:
        """A client keeps the items that were complete; the next answer stands behind them."""
        old, new = ("a" * 20, "b" * 20)
        text = said("I look.") | ({"id": f"msg_{old}"} if ids else {})
        cut = [thought("hm", minted.signature(old)), text][:kept]
        again = called(minted.call_id("call_", new, 0))
        first, second, _ = parse([*cut, again, output(again["call_id"])]).messages
        assert (first.reasoning, first.tool_calls, second.text) == ("hm", (), "")
        assert second.marks == (again["call_id"],)
        if ids:  # a text is told apart as well
            text = said("Again.") | {"id": f"msg_{new}"}
            first, second, _ = parse([*cut[:1], text, again, output(again["call_id"])]).messages
            assert (first.text, second.text) == ("", "Again.")

    @pytest.mark.parametrize(
        "mark", ["", "call_1_0", "call_" + "a" * 19, "rs_" + "A" * 20, "c2FuZGxvdDp0MQ==", "é", "===="]
    )
    def test_marks_of_others_name_no_turn(self, mark: str) -> None:
        assert minted.turn_of(mark) == ""
        assert (
            minted.turn_of(minted.signature("a" * 20))
            == minted.turn_of(minted.call_id("toolu_", "a" * 20, 3))
            == "a" * 20
        )

    def test_an_empty_turn_is_kept_with_its_mark(self) -> None:
        (turn,) = parse([thought("", "E9")]).messages
        assert turn == Message("assistant")
        assert turn.marks == ("E9",)

    @pytest.mark.parametrize(
        ("raw", "arguments"), [("", {}), ("{}", {}), ('{"cmd":', '{"cmd":'), ("[1]", "[1]"), ("null", "null")]
    )
    def test_arguments_as_on_the_other_wires(self, raw: str, arguments: Any) -> None:
        (turn,) = parse([called("c", raw)]).messages
        assert turn.tool_calls[0].arguments == arguments

    def test_custom_namespaced_and_search_calls(self) -> None:
        items = [
            {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** Begin"},
            called("b", "{}", namespace="agents"),
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
            output("b"),
            {"type": "tool_search_output", "call_id": "c", "tools": [EXEC], "execution": "client"},
        ]
        asked = parse(items)
        assert asked.messages[0].tool_calls == (
            ToolCall("apply_patch", {"input": "*** Begin"}, "a"),
            ToolCall("agents__exec", {}, "b"),
            ToolCall("tool_search", {"query": "q"}, "c"),
        )
        assert asked.found == asked.callable == (Tool("exec", "d", SCHEMA),)
        assert msgspec.json.decode(asked.messages[3].text)[0]["name"] == "exec"

    def test_found_tools_that_are_offered_anyway_are_no_news(self) -> None:
        search = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}}
        asked = parse([search, {"type": "tool_search_output", "call_id": "c", "tools": [EXEC, EXEC]}], tools=[EXEC])
        assert asked.found == ()

    @pytest.mark.parametrize(
        "item",
        [
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "brand_new", "x": 1},
            {"type": "tool_search_output", "call_id": None, "tools": []},
            {"type": "shell_call", "call_id": "c"},
            {"type": "apply_patch_call", "call_id": "c", "operation": None},
            {"type": "shell", "action": {"commands": []}},
            {"brand": "new"},
        ],
    )
    def test_what_cannot_be_shown_becomes_a_note(self, item: dict[str, Any]) -> None:
        note = parse([{"role": "user", "content": "go"}, item]).messages[1]
        assert note.text == f"[{item.get('type', 'block')} left out: this model reads text only]"

    def test_a_result_that_names_no_call_is_of_the_first_open_one(self) -> None:
        items = [called("a", "{}"), called("b", "{}", name="other"), {"type": "function_call_output", "output": "x"}]
        named = {"type": "function_call_output", "call_id": None, "name": "other", "output": "y"}
        assert [m.text for m in parse([*items, named]).messages[1:]] == ["x", "y"]
        assert [m.tool_name for m in parse([*items[:2], named]).messages[1:]] == ["other"]

    def test_settings_in_the_midst_change_nothing(self) -> None:
        go = {"role": "user", "content": "go"}
        assert parse([{"type": "configuration_update", "reasoning": {}}, go]) == parse([go])

    def test_tools_that_are_added_in_the_midst_are_told_there(self) -> None:
        more = {"type": "additional_tools", "role": "developer", "tools": [EXEC]}
        asked = parse([{"role": "user", "content": "go"}, more])
        assert (asked.tools, asked.found) == ((), (Tool("exec", "d", SCHEMA),))
        assert asked.messages[1].role == "system"
        assert msgspec.json.decode(asked.messages[1].text)[0]["name"] == "exec"

    @pytest.mark.parametrize(
        ("output", "text"),
        [
            ([{"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 3}}], "a\nb\n[exit code 3]"),
            ([{"stdout": None, "outcome": {"type": "timeout"}}], "[timed out]"),
            ([{"stdout": "a", "outcome": 3}], "a"),
            (
                [{"type": "input_text", "text": "x"}, {"brand": "new"}],
                "x\n[block left out: this model reads text only]",
            ),
            ("as it is", "as it is"),
            (None, ""),
            ({"odd": 1}, '{"odd":1}'),
        ],
    )
    def test_what_a_shell_gave(self, output: Any, text: str) -> None:
        call = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
        turn, came = parse([call, {"type": "shell_call_output", "call_id": "c", "output": output}]).messages
        assert turn.tool_calls == (ToolCall("shell", {"commands": ["ls"]}, "c"),)
        assert came.text == text

    def test_an_image_becomes_a_note(self) -> None:
        content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:"}]
        assert "input_image left out" in parse([{"role": "user", "content": content}]).messages[0].text

    @pytest.mark.parametrize(
        ("items", "match"),
        [
            ([], "input: it must be"),
            (None, "input: it must be"),
            (3, "input: it must be"),
            ([3], "input.0: an item must be an object"),
            ([{"role": "judge", "content": "x"}], "input.0.role: 'judge' is unknown"),
            ([output("nobody")], "nobody"),
            ([{"type": "item_reference", "id": "x"}], "store: false"),
            ([{"role": "user", "content": "x"}, {"type": "compaction_trigger"}], "input.1: histories are not"),
            ([{"id": "msg_x"}], "store: false"),
            ([{"type": "local_shell_call_output", "output": "x"}], "must name its call"),
            ([{"role": "user", "content": "x"}, 3, output("nobody")], "input.1: an item"),
        ],
    )
    def test_what_makes_no_sense_is_named(self, items: Any, match: str) -> None:
        with pytest.raises(WireError, match=match) as caught:
            parse(items)
        assert caught.value.kind == "invalid_request"

    @pytest.mark.parametrize("field", ["conversation", "prompt"])
    def test_what_would_have_to_be_stored_is_refused(self, field: str) -> None:
        with pytest.raises(WireError, match=f"^{field}: .* send"):
            parse("go", **{field: "x"})
        assert parse("go", **{field: None}).messages

    @pytest.mark.parametrize("known", ["resp_1", "", "chatcmpl-1", 1, {}])
    def test_an_earlier_response_that_is_not_known_is_refused(self, known: Any) -> None:
        with pytest.raises(WireError, match=r"^previous_response_id: .*send the whole history") as caught:
            parse("go", previous_response_id=known)
        assert caught.value.kind == "not_found"

    def test_an_earlier_response_is_gone_on_from_without_its_instructions(self) -> None:
        first = parse("go", instructions="Be brief.")
        assert first.stored == (Message("user", "go"),)
        assert parse("go", store=False).stored is None
        calls = (ToolCall("exec", {"cmd": "ls"}, "c1"), ToolCall("exec", {}, "c2"))
        stored = Stored((*first.stored, Message("assistant", "", "", calls, marks=("c1", "c2"))), (Tool("exec"),))
        body = {"input": [output("c2", "two"), output("c1", "one")], "previous_response_id": "resp_ab"}
        asked = WIRE.parse({"instructions": "Be long.", **body}, {}, "", {"chatcmpl-ab": stored}.get)
        assert asked.messages[0] == Message("system", "Be long.")
        assert asked.messages[1:3] == stored.messages
        assert asked.messages[2].marks == ("c1", "c2")
        assert [m.text for m in asked.messages[3:]] == ["one", "two"]
        assert asked.stored == asked.messages[1:]
        assert (asked.found, asked.previous) == ((Tool("exec"),), "resp_ab")

    def test_unknown_fields_change_nothing(self) -> None:
        assert parse("go", brand_new=1, prompt_cache_key="k", text={}, client_metadata={"a": 1}) == parse("go")


class TestTools:
    def test_of_every_kind(self) -> None:
        nested = [EXEC, {"type": "custom", "name": "raw"}]
        declared = [
            EXEC,
            {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
            {"type": "namespace", "name": "ns", "tools": nested},
            {"type": "tool_search", "execution": "client", "parameters": SCHEMA},
            {"type": "tool_search", "execution": "server"},
            {"type": "local_shell"},
            {"type": "shell"},
            {"type": "shell", "environment": {"type": "container_auto"}},
            {"type": "web_search"},
            {"type": "file_search", "vector_store_ids": ["v"]},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "image_generation"},
            {"type": "computer"},
            {"type": "brand_new", "name": "x"},
            {"type": "function"},
        ]
        tools = parse("go", tools=declared).tools
        assert [(t.name, t.kind, t.namespace) for t in tools] == [
            ("exec", "function", ""),
            ("apply_patch", "custom", ""),
            ("ns__exec", "function", "ns"),
            ("ns__raw", "custom", "ns"),
            ("tool_search", "search", ""),
            ("local_shell", "local_shell", ""),
            ("shell", "shell", ""),
        ]
        assert tools[0].parameters == tools[2].parameters == SCHEMA

    def test_branches(self) -> None:
        def branch(headers: dict[str, str], tools: Any = (EXEC,)) -> str:
            return WIRE.parse({"input": "x", "tools": list(tools)}, headers).branch

        child = {"x-openai-subagent": "collab_spawn", "thread-id": "T2", "x-codex-parent-thread-id": "T1"}
        assert branch({"thread-id": "T1"}) == "main"
        assert branch(child) == "subagent:T2"
        assert branch({"x-codex-turn-metadata": '{"a":1,"request_kind":"compaction"}'}) == "side"
        assert branch({"x-codex-turn-metadata": '{"request_kind":"turn"}'}) == "main"
        assert branch({}, ()) == "side"


def events(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


class TestEvents:
    ASKED = parse("go", tools=[EXEC], stream=True)

    def test_order_and_numbers(self) -> None:
        told = answer(WIRE, Reply("text", "think", (call("exec", {"cmd": "ls"}),)))
        seen = events(WIRE.head(told.head, self.ASKED) + WIRE.tail(told, self.ASKED))
        assert [e["sequence_number"] for e in seen] == list(range(len(seen)))
        assert [e["type"].removeprefix("response.") for e in seen] == [
            "created",
            "in_progress",
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        items = [e for e in seen if e["type"] == "response.output_item.done"]
        assert [e["output_index"] for e in items] == [0, 1, 2]
        assert seen[-1]["response"]["output"] == [e["item"] for e in items]
        assert msgspec.json.decode(WIRE.body(told, self.ASKED)) == seen[-1]["response"]
        for event in seen:
            if "item_id" in event:
                assert event["item_id"] == items[event["output_index"]]["item"]["id"]

    def test_every_event_has_the_next_number(self) -> None:
        told = answer(WIRE, Reply("x"))
        begun = WIRE.head(told.head, self.ASKED)
        begun += b"".join(WIRE.keepalive(told.head, self.ASKED, beats) for beats in range(3))
        failed = WIRE.error_event(WireError("overloaded", "x"), told.head, self.ASKED, 3)
        for end in (WIRE.tail(told, self.ASKED, 3), failed):
            seen = events(begun + end)
            assert [e["sequence_number"] for e in seen] == list(range(len(seen)))
        assert [e["type"] for e in seen[1:5]] == ["response.in_progress"] * 4
        assert seen[1] | {"sequence_number": 4} == seen[4]

    def test_what_was_asked_is_told_again(self) -> None:
        asked = WIRE.parse({"input": "x", "previous_response_id": "resp_1"}, {}, "", lambda _: Stored((), ()))
        told = answer(WIRE, Reply("x"))
        body = msgspec.json.decode(WIRE.body(told, asked))
        assert (body["store"], body["previous_response_id"]) == (True, "resp_1")
        assert msgspec.json.decode(WIRE.body(told, parse("x", store=False)))["store"] is False

    @pytest.mark.parametrize("finish", ["length", "stop", "tool_calls"])
    @pytest.mark.parametrize("before", [(), (call("exec", {"cmd": "ls"}),)])
    def test_a_cut_call_is_not_sent(self, finish: str, before: tuple[Any, ...]) -> None:
        cut = call("write_file", {"path": "/w/a.py", "content": "def f():\n    retu"}, "unclosed")
        told = answer(WIRE, Reply("so", calls=(*before, cut)), finish=finish)
        raw = WIRE.tail(told, self.ASKED)
        assert b"write_file" not in raw + WIRE.body(told, self.ASKED)
        last = events(raw)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [i["type"] for i in last["response"]["output"] if i["type"] == "function_call"] == [
            "function_call" for _ in before
        ]

    @pytest.mark.parametrize("raw", ['{"cmd": "echo two"', "[1]", "null", "rm -rf"])
    def test_broken_arguments_reach_the_agent(self, raw: str) -> None:
        told = answer(WIRE, Reply(calls=(call("exec", raw, "invalid_arguments"),)))
        item = msgspec.json.decode(WIRE.body(told, self.ASKED))["output"][0]
        assert (item["type"], item["arguments"]) == ("function_call", raw)
        (back,) = parse([item]).messages
        assert back.digest == told.reply.as_message().digest

    def test_count(self) -> None:
        assert msgspec.json.decode(WIRE.count_body(4)) == {"object": "response.input_tokens", "input_tokens": 4}
