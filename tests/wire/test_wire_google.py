"""Google's requests in canonical form, in both spellings, and its two ways of streaming."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from sandlot.chat.messages import Message, Reply, Tool, ToolCall
from sandlot.gateway.wire import ChatRequest, WireError
from sandlot.gateway.wire.google import GoogleWire
from support.wire_server import answer, call

WIRE = GoogleWire()
STREAM = "/v1beta/models/m:streamGenerateContent"


def parse(contents: Any, target: str = "/v1beta/models/m:generateContent", **body: Any) -> ChatRequest:
    return WIRE.parse({"contents": contents, **body}, {}, target)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": p} if isinstance(p, str) else p for p in parts]}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": [{"text": p} if isinstance(p, str) else p for p in parts]}


def calls(name: str, call_id: str = "", **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args} | ({"id": call_id} if call_id else {})}


def result(name: str, response: Any, call_id: str = "") -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response} | ({"id": call_id} if call_id else {})}


class TestPath:
    @pytest.mark.parametrize(
        ("target", "name", "stream", "framing"),
        [
            ("/v1beta/models/gemini-x:generateContent", "gemini-x", False, "array"),
            (f"{STREAM}?alt=sse", "m", True, "events"),
            (STREAM, "m", True, "array"),
            ("/s/abc/v1/models/tuned%2Fa:streamGenerateContent?key=k&alt=sse", "tuned/a", True, "events"),
            ("/v1beta/models/m:countTokens", "m", False, "array"),
        ],
    )
    def test_says_model_and_stream(self, target: str, name: str, stream: bool, framing: str) -> None:
        asked = parse([user("go")], target)
        assert (asked.model, asked.stream, asked.framing) == (name, stream, framing)


class TestMessages:
    @pytest.mark.parametrize(
        "system",
        [
            {"systemInstruction": {"parts": [{"text": "a"}, {"text": "b"}]}},
            {"system_instruction": {"role": "user", "parts": [{"text": "a\nb"}]}},
            {"systemInstruction": "a\nb"},
            {"systemInstruction": {"text": "a\nb"}},
        ],
    )
    def test_system_in_either_spelling(self, system: Any) -> None:
        assert parse([user("go")], **system).messages == (Message("system", "a\nb"), Message("user", "go"))

    @pytest.mark.parametrize("contents", ["go", {"parts": [{"text": "go"}]}, [{"parts": {"text": "go"}}], [user("go")]])
    def test_contents_in_every_shape(self, contents: Any) -> None:
        assert parse(contents).messages == (Message("user", "go"),)

    def test_a_turn_with_its_marks_in_either_spelling(self) -> None:
        camel = model(
            {"text": "hm", "thought": True}, "I look.", {**calls("ls", "c1", p=5000.0), "thoughtSignature": "S"}
        )
        snake = model(
            {"thought": True, "text": "hm"},
            {"text": "I look."},
            {"function_call": {"args": {"p": 5000}, "name": "ls", "id": "c1"}, "thought_signature": "S"},
        )
        for content in (camel, snake):
            (turn,) = parse([content]).messages
            assert (turn.text, turn.reasoning, turn.tool_calls) == (
                "I look.",
                "hm",
                (ToolCall("ls", {"p": 5000}, "c1"),),
            )
            assert turn.marks == ("S", "c1")
            assert turn.digest == parse([camel]).messages[0].digest

    def test_lost_thoughts_and_ids_do_not_change_the_meaning(self) -> None:
        whole = parse([model({"text": "hm", "thought": True}, calls("ls", "c1", p=1))]).messages[0]
        bare = parse([model(calls("ls", p=1))]).messages[0]
        assert whole.digest == bare.digest

    @pytest.mark.parametrize("order", list(itertools.permutations("ab")))
    def test_results_with_ids_stand_in_call_order(self, order: tuple[str, ...]) -> None:
        content = model(calls("ls", "a"), calls("ls", "b"))
        results = user(*(result("ls", {"output": i}, i) for i in order))
        assert [m.text for m in parse([content, results]).messages[1:]] == ["a", "b"]

    def test_results_without_ids_pair_by_name_in_order(self) -> None:
        content = model(calls("ls", p=1), calls("cat"), calls("ls", p=2))
        results = user(result("ls", {"output": "1"}), result("ls", {"output": "2"}), result("cat", {"output": "c"}))
        messages = parse([content, results, user("and now")]).messages
        assert [(m.tool_name, m.text) for m in messages[1:4]] == [("ls", "1"), ("cat", "c"), ("ls", "2")]

    def test_ids_that_the_client_lost_on_one_side_pair_by_name(self) -> None:
        messages = parse([model(calls("ls")), user(result("ls", {"output": "x"}, "ls_17_0"))]).messages
        assert messages[1] == Message("tool", "x", tool_name="ls")

    def test_a_result_that_comes_twice_is_kept_twice(self) -> None:
        twice = user(result("ls", {"output": "x"}), result("ls", {"output": "x"}))
        assert [m.text for m in parse([model(calls("ls")), twice]).messages[1:]] == ["x", "x"]

    @pytest.mark.parametrize(
        ("response", "text", "is_error"),
        [
            ({"output": "a"}, "a", False),
            ({"result": "a"}, "a", False),
            ({"name": "ls", "content": "a"}, "a", False),
            ({"error": "no"}, "no", True),
            ({"output": "a", "returncode": 0}, '{"output":"a","returncode":0}', False),
            ({"output": {"x": 1}}, '{"output":{"x":1}}', False),
            ({}, "{}", False),
            ("a", "a", False),
            (None, "null", False),
        ],
    )
    def test_the_text_of_a_result(self, response: Any, text: str, is_error: bool) -> None:
        message = parse([model(calls("ls")), user(result("ls", response))]).messages[1]
        assert (message.text, message.is_error) == (text, is_error)

    def test_what_is_no_text_becomes_a_note(self) -> None:
        image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
        note = "[inlineData left out: this model reads text only]"
        assert parse([user("see", image)]).messages[0].text == f"see\n{note}"
        odd = {"videoMetadata": {}, "thought_signature": "x", "functionCall": None, "text": None, **image}
        assert parse([user(odd, {"text": None}, {})]).messages[0].text == note
        shown = result("ls", {"output": "an image"})
        shown["functionResponse"]["parts"] = [image]
        assert parse([model(calls("ls")), user(shown)]).messages[1].text == f"an image\n{note}"

    @pytest.mark.parametrize(
        ("contents", "match"),
        [
            ([], "contents: it must be"),
            (None, "contents: it must be"),
            ([{"role": "judge", "parts": []}], "contents.0.role: 'judge' is unknown"),
            ([{"role": "user", "parts": [3]}], "contents.0: a part must be an object"),
            ([{"role": "user", "parts": 3}], "contents.0: a content must have a list of parts"),
            ([user(result("nobody", {}))], "contents.0.parts.0: "),
        ],
    )
    def test_what_makes_no_sense_is_named(self, contents: Any, match: str) -> None:
        with pytest.raises(WireError, match=match) as caught:
            parse(contents)
        assert caught.value.kind == "invalid_request"


class TestTools:
    def test_schemas_become_json_schema(self) -> None:
        schema = {
            "type": "OBJECT",
            "properties": {
                "type": {"type": "STRING", "enum": ["STRING", "OBJECT"]},
                "n": {"type": "ARRAY", "items": {"type": "INTEGER"}},
            },
        }
        plain = {"type": "object", "properties": {"type": {"type": "string"}}}
        tools = [
            {"functionDeclarations": [{"name": "a", "description": "d", "parameters": schema}]},
            {"function_declarations": [{"name": "b", "parametersJsonSchema": plain}, {"name": "c"}]},
            {"googleSearch": {}},
        ]
        assert parse("go", tools=tools).tools == (
            Tool(
                "a",
                "d",
                {
                    "type": "object",
                    "properties": {
                        "type": {"type": "string", "enum": ["STRING", "OBJECT"]},
                        "n": {"type": "array", "items": {"type": "integer"}},
                    },
                },
            ),
            Tool("b", "", plain),
            Tool("c"),
        )

    def test_settings(self) -> None:
        config = {"maxOutputTokens": 9, "temperature": 0, "responseMimeType": "application/json"}
        assert parse("go", generationConfig=config).max_tokens == 9
        assert parse("go", generation_config={"max_output_tokens": 9}).max_tokens == 9
        assert parse("go", safetySettings=[], brandNew=1) == parse("go", generationConfig={"candidateCount": 1})

    @pytest.mark.parametrize(
        "fields", [{"generationConfig": {"candidateCount": 2}}, {"cachedContent": "x"}, {"cached_content": "x"}]
    )
    def test_what_cannot_be_done_is_refused_by_name(self, fields: dict[str, Any]) -> None:
        with pytest.raises(WireError, match=r"^(candidateCount|cachedContent): .*; (leave|send)"):
            parse("go", **fields)


class TestAnswers:
    @pytest.mark.parametrize("target", [STREAM, f"{STREAM}?alt=sse"])
    def test_streams_hold_the_whole_answer(self, target: str) -> None:
        told = answer(WIRE, Reply("text", "think", (call("ls", {"p": 1}), call("ls", {"p": 2}))))
        asked = parse([user("go")], target)
        raw = WIRE.head(told.head, asked) + WIRE.keepalive(told.head, asked) + WIRE.tail(told, asked)
        if asked.framing == "array":
            chunks = msgspec.json.decode(raw)
        else:
            chunks = [msgspec.json.decode(b[6:]) for b in raw.decode().removesuffix("\n\n").split("\n\n")]
        parts = [p for c in chunks for p in c["candidates"][0]["content"]["parts"] if p.get("text") != ""]
        whole = msgspec.json.decode(WIRE.body(told, asked))
        assert parts == whole["candidates"][0]["content"]["parts"]
        assert [c["candidates"][0].get("finishReason") for c in chunks] == [None] * (len(chunks) - 1) + ["STOP"]
        assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
        assert [p.get("thoughtSignature") for p in parts] == [None] * 3 + [told.signature]

    @pytest.mark.parametrize("raw", ['{"cmd": "echo two"', "[1]", "null", "rm -rf"])
    def test_broken_arguments_reach_the_agent_in_a_marked_wrapper(self, raw: str) -> None:
        told = answer(WIRE, Reply(calls=(call("sh", raw, "invalid_arguments"),)))
        content = msgspec.json.decode(WIRE.body(told, parse("go")))["candidates"][0]["content"]
        assert content["parts"][0]["functionCall"]["args"] == {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
        (back,) = parse([content]).messages
        assert back.digest == told.reply.as_message().digest

    def test_a_cut_call_is_not_sent(self) -> None:
        cut = call("write_file", {"path": "a"}, "unclosed")
        told = answer(WIRE, Reply("so", calls=(cut,)), finish="stop")
        body = WIRE.body(told, parse("go"))
        assert b"write_file" not in body + WIRE.tail(told, parse("go"))
        assert msgspec.json.decode(body)["candidates"][0]["finishReason"] == "MAX_TOKENS"

    @pytest.mark.parametrize("target", [STREAM, f"{STREAM}?alt=sse"])
    def test_an_error_ends_the_stream(self, target: str) -> None:
        told, asked = answer(WIRE, Reply("x")), parse("go", target)
        error = WireError("overloaded", "the engine failed")
        raw = WIRE.head(told.head, asked) + WIRE.error_event(error, told.head, asked)
        last = (
            msgspec.json.decode(raw)[-1] if asked.framing == "array" else msgspec.json.decode(raw.split(b"data: ")[-1])
        )
        assert last == {"error": {"code": 503, "message": "the engine failed", "status": "UNAVAILABLE"}}

    def test_count(self) -> None:
        assert msgspec.json.decode(WIRE.count_body(42)) == {"totalTokens": 42}
