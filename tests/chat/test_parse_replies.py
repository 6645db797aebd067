"""Taking apart what the model wrote: thoughts, calls in both forms, and everything that models get wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandlot.chat.format import TemplateFormat, load_chat_format
from sandlot.chat.markup import Markup
from sandlot.chat.messages import Reply, Tool
from sandlot.chat.parse import parse_reply
from support.chat_templates import SHAPES, write_chat_dir
from support.profiles import few


def tool(name: str, **properties: object) -> Tool:
    return Tool(name, "", {"type": "object", "properties": properties})


TOOLS = (
    tool("Bash", command={"type": "string"}, timeout={"type": "integer"}),
    tool("Write", path={"type": "string"}, content={"type": "string"}),
    tool("Read", path={"type": "string"}),
    Tool("LS"),
)


def xml_call(name: str, **values: str) -> str:
    parts = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def json_call(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def parse(text: str, *, tools: tuple[Tool, ...] = TOOLS, thought_open: bool = False, cut: bool = False) -> Reply:
    """Parse with markers that are ordinary text, the harder case."""
    markup = Markup("<think>", "</think>", "<tool_call>", "</tool_call>", calls_are_tokens=False, xml=True)
    return parse_reply(text, thought_open=thought_open, markup=markup, tools=tools, truncated=cut)


def sampled(chat: TemplateFormat, text: str, *, stop: bool = True) -> list[int]:
    """Ids of a model's output in which every control string is the control token."""
    ids = chat.tokenizer.encode(chat.tokenizer.conceal(text))
    return [*ids, chat.stop_token_ids[0]] if stop else ids


class TestMissingCloseTags:
    """A value ends at its close tag, else at the next parameter or at the end of the function."""

    @pytest.mark.parametrize("form", ["complete", "last open", "first open", "both open", "function open"])
    def test_no_parameter_is_lost(self, form: str) -> None:
        text = xml_call("Bash", timeout="5", command="ls -l")
        if form in ("first open", "both open"):
            text = text.replace("5\n</parameter>\n", "5\n")
        if form in ("last open", "both open"):
            text = text.replace("ls -l\n</parameter>\n", "ls -l\n")
        if form == "function open":
            text = text.replace("</function>\n", "")
        reply = parse(text)
        assert [(c.name, c.arguments, c.status) for c in reply.calls] == [
            ("Bash", {"timeout": 5, "command": "ls -l"}, "ok")
        ]
        assert not reply.truncated
        assert not reply.ambiguous
        assert reply.text == ""

    def test_call_close_missing_before_the_next_call(self) -> None:
        for first in (xml_call("LS"), json_call("LS", {})):
            reply = parse(first.removesuffix("\n</tool_call>") + "\n" + xml_call("Read", path="a"))
            assert [(c.name, c.arguments, c.status) for c in reply.calls] == [
                ("LS", {}, "ok"),
                ("Read", {"path": "a"}, "ok"),
            ]


NESTED = xml_call("Write", path="in.py", content="x = 1")
VALUES_WITH_MARKUP = [
    'S = "<parameter=x>1</parameter>"\nE = "</tool_call>"\nif a < b && c: pass',
    NESTED,
    f"before\n{NESTED}\nbetween\n{NESTED}\nafter",
    "</tool_call>",
    "a </function> b",
    "re.compile(r'<function=([^>]+)>(.*?)</function>')",
    "<tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    "<think>\nno thought\n</think>",
    "<a href='x'>&amp;</a>",
    "\n\nblank lines\n\n",
    "",
]


class TestValuesThatHoldTheMarkup:
    """A value is never cut at markup inside it."""

    @pytest.mark.parametrize("value", VALUES_WITH_MARKUP)
    def test_value_comes_back_byte_for_byte(self, value: str) -> None:
        reply = parse("I write it.\n" + xml_call("Write", path="t.py", content=value))
        assert [c.arguments for c in reply.calls] == [{"path": "t.py", "content": value}]
        assert reply.text == "I write it."
        assert not reply.ambiguous

    @pytest.mark.parametrize("value", VALUES_WITH_MARKUP)
    def test_also_between_two_calls_and_before_another_parameter(self, value: str) -> None:
        text = "\n".join([xml_call("Write", content=value, path="p"), xml_call("Read", path="r")])
        reply = parse(text)
        assert [(c.name, c.arguments) for c in reply.calls] == [
            ("Write", {"content": value, "path": "p"}),
            ("Read", {"path": "r"}),
        ]

    @pytest.mark.parametrize("value", VALUES_WITH_MARKUP)
    def test_json_form_and_sampled_tokens(self, value: str, formats: Mapping[str, TemplateFormat]) -> None:
        """Inside a JSON string markup is data, even where the model sampled the control token for it."""
        text = json_call("Write", {"path": "t", "content": value})
        for name in ("stripping", "headers"):
            reply = formats[name].parse(sampled(formats[name], text), [], TOOLS, truncated=False)
            assert [(c.arguments, c.status) for c in reply.calls] == [({"path": "t", "content": value}, "ok")]

    def test_two_equally_good_readings_are_marked_not_cut(self) -> None:
        value = "</parameter>\n</function>\n</tool_call>"
        reply = parse(xml_call("Write", path="t", content=value))
        assert reply.ambiguous
        assert reply.calls[0].arguments == {"path": "t", "content": value}

    @given(st.lists(st.sampled_from(["x", "\n", " ", NESTED, "<parameter=k>", "</parameter>", '"<b>"']), max_size=6))
    def test_balanced_markup_is_exact(self, parts: list[str]) -> None:
        value = "".join(parts)
        opens, balanced = 0, True
        for part in parts:
            opens += (part == "<parameter=k>") - (part == "</parameter>")
            balanced = balanced and opens >= 0
        reply = parse(xml_call("Write", path="t", content=value))
        if balanced and opens == 0:
            assert [c.arguments for c in reply.calls] == [{"path": "t", "content": value}]
        else:
            assert reply.calls  # whatever the damage, there is a call and no exception

    def test_thousands_of_tags_are_read_in_time(self) -> None:
        page = "<parameter=a>\n</parameter>\n</function>\n" * 2000
        reply = parse(xml_call("Write", path="t", content=page))
        assert reply.calls[0].arguments == {"path": "t", "content": page}


class TestArgumentTypes:
    """XML values are text; the tool's schema says what they are."""

    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            ({"type": "string"}, "5", "5"),
            ({"type": "string"}, "true", "true"),
            ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
            ({"type": "string"}, "null", "null"),
            ({"type": ["string", "null"]}, "null", None),
            ({"type": "integer"}, "5", 5),
            ({"type": "integer"}, "5.0", 5),
            ({"type": "integer"}, "five", "five"),
            ({"type": "integer"}, "5.5", "5.5"),
            ({"type": "number"}, "5.5", 5.5),
            ({"type": "number"}, "-3", -3),
            ({"type": "number"}, "nan", "nan"),
            ({"type": "boolean"}, "True", True),
            ({"type": "boolean"}, "false", False),
            ({"type": "boolean"}, "yes", "yes"),
            ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
            ({"type": "object"}, "{broken", "{broken"),
            ({"type": "array"}, "[1, 2]", [1, 2]),
            ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
            ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
            ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
            ({"$ref": "#/$defs/Size"}, "7", 7),
            ({"enum": [1, 2]}, "2", 2),
            ({"const": True}, "true", True),
            ({}, "7", "7"),
        ],
    )
    def test_typed_by_schema(self, schema: dict[str, object], text: str, value: object) -> None:
        parameters = {"properties": {"v": schema}, "$defs": {"Size": {"type": "integer"}}}
        reply = parse(xml_call("T", v=text), tools=(Tool("T", "", parameters),))
        arguments = reply.calls[0].arguments
        assert isinstance(arguments, dict)
        assert arguments["v"] == value
        assert type(arguments["v"]) is type(value)


class TestThoughts:
    """A thought ends at its close marker, else at a call, else at the end; the prompt says whether one is open."""

    def test_call_ends_an_unclosed_thought(self) -> None:
        for call in (xml_call("LS"), json_call("LS", {})):
            reply = parse(f"look first\n{call}", thought_open=True)
            assert (reply.reasoning, reply.text) == ("look first", "")
            assert [(c.name, c.status) for c in reply.calls] == [("LS", "ok")]

    @pytest.mark.parametrize("cut", [True, False])
    def test_unclosed_thought_is_no_answer(self, cut: bool) -> None:
        reply = parse("so the bug is in", thought_open=True, cut=cut)
        assert reply == Reply(reasoning="so the bug is in", truncated=cut)

    def test_prompt_that_closed_the_thought(self) -> None:
        assert parse("Done.") == Reply("Done.")

    def test_call_quoted_in_a_closed_thought(self) -> None:
        for call in (xml_call("LS"), json_call("LS", {}), "`<tool_call>`", "<tool_call>"):
            reply = parse(f"I could do\n{call}\nbut no.\n</think>\n\nNo.", thought_open=True)
            assert reply == Reply("No.", f"I could do\n{call}\nbut no.")

    def test_close_marker_inside_the_call_that_ends_a_thought(self) -> None:
        call = json_call("Write", {"path": "t", "content": "a\n</think>\nb"})
        reply = parse(f"write\n{call}", thought_open=True)
        assert reply.reasoning == "write"
        assert [c.arguments for c in reply.calls] == [{"path": "t", "content": "a\n</think>\nb"}]
        assert reply.ambiguous

    def test_thought_opened_by_the_model_itself(self) -> None:
        for is_open in (True, False):
            reply = parse(f"<think>\nplan\n</think>\n\nGo.\n{xml_call('LS')}", thought_open=is_open)
            assert (reply.reasoning, reply.text, len(reply.calls)) == ("plan", "Go.", 1)

    def test_marker_in_the_middle_of_text_opens_nothing(self) -> None:
        assert parse("The tag <think> opens a thought.") == Reply("The tag <think> opens a thought.")

    @pytest.mark.parametrize(
        ("name", "prompt", "is_open"),
        [
            ("stripping", "<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
            ("stripping", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
            ("stripping", "<|im_start|>assistant\n<think>\ncut off<|im_end|>\n<|im_start|>assistant\n", False),
            ("headers", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<think>\n", True),
            ("headers", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<think>\n</think>\n\n", False),
            ("headers", "<think>\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ],
    )
    def test_decided_by_the_prompt_ids(
        self, formats: Mapping[str, TemplateFormat], name: str, prompt: str, is_open: bool
    ) -> None:
        chat = formats[name]
        reply = chat.parse(sampled(chat, "Well."), sampled(chat, prompt, stop=False), TOOLS, truncated=False)
        assert reply == (Reply(reasoning="Well.") if is_open else Reply("Well."))

    def test_decided_by_the_rendered_prompt(self, formats: Mapping[str, TemplateFormat]) -> None:
        from sandlot.chat.messages import Message

        chat = formats["xml"]  # its generation prompt opens a thought
        prompt = chat.render([Message("user", "say </think> and <think>")], TOOLS)
        reply = chat.parse(sampled(chat, "hm\n</think>\n\nYes."), prompt, TOOLS, truncated=False)
        assert reply == Reply("Yes.", "hm")

    def test_closed_although_nobody_opened_it(self, formats: Mapping[str, TemplateFormat]) -> None:
        """So hybrid models say that they have no thought; where it is spelled it is text."""
        chat = formats["stripping"]
        assert chat.parse(sampled(chat, "</think>\n\nYes."), (), TOOLS, truncated=False) == Reply("Yes.")
        spelled = [*chat.encode("</think>\n\nYes."), chat.stop_token_ids[0]]
        assert chat.parse(spelled, (), TOOLS, truncated=False) == Reply("</think>\n\nYes.")
        assert parse("</think> closes it.") == Reply("</think> closes it.")


@pytest.mark.parametrize("family", ["xml", "minimax"])
def test_close_tags_that_are_tokens(tmp_path: Path, family: str) -> None:
    """Some vocabularies have one for the end of a function or of a parameter."""
    text, tokens = {
        "xml": (xml_call("Bash", command="ls -l"), ("</function>", "</parameter>")),
        "minimax": (
            '<minimax:tool_call>\n<invoke name="Bash">\n<parameter name="command">ls -l</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
            ("</invoke>", "</parameter>", "<minimax:tool_call>"),
        ),
    }[family]
    shape = replace(SHAPES["embedded"], tokens=(*SHAPES["embedded"].tokens, *tokens))
    chat = load_chat_format(write_chat_dir(tmp_path / "m", shape), parser="minimax" if family == "minimax" else None)
    assert isinstance(chat, TemplateFormat)
    reply = chat.parse(sampled(chat, text), (), TOOLS, truncated=False)
    assert [(c.name, c.arguments, c.status) for c in reply.calls] == [("Bash", {"command": "ls -l"}, "ok")]
    assert reply.text == ""


class TestCallsThatWereCut:
    """A call that was not closed is never shown as a whole one, whatever the engine says of the end."""

    @pytest.mark.parametrize("cut", [True, False])
    def test_cut_in_a_value(self, cut: bool) -> None:
        text = xml_call("Write", path="/w/a.py", content="def f():\n    return 1")
        reply = parse(text[: text.index("rn 1")], cut=cut)
        assert reply.truncated
        assert [(c.name, c.status) for c in reply.calls] == [("Write", "unclosed")]
        assert isinstance(reply.calls[0].arguments, str)
        assert "def f():\n    retu" in reply.calls[0].raw
        assert reply.text == ""

    @pytest.mark.parametrize("name", ["stripping", "headers"])
    @pytest.mark.parametrize("form", ["xml", "json"])
    def test_cut_at_every_token(self, formats: Mapping[str, TemplateFormat], name: str, form: str) -> None:
        """Every prefix of an answer: a call is whole and right, or it is `unclosed`."""
        chat = formats[name]
        wanted = [("Bash", {"command": "echo '}}' > a", "timeout": 3}), ("Write", {"path": "p", "content": NESTED})]
        if form == "xml":
            calls = [xml_call(n, **{k: str(v) for k, v in a.items()}) for n, a in wanted]
        else:
            calls = [json_call(n, a) for n, a in wanted]
        ids = sampled(chat, "I go.\n" + "\n".join(calls), stop=False)
        for end in range(len(ids) + 1):
            reply = chat.parse(ids[:end], [], TOOLS, truncated=end < len(ids))
            whole = [(c.name, c.arguments) for c in reply.calls if c.status != "unclosed"]
            assert whole == wanted[: len(whole)]
            assert all(c.status in ("ok", "unclosed") for c in reply.calls)
            assert reply.truncated == (end < len(ids))
            opened = chat.decode(ids[:end]).endswith("<tool_call>")
            assert not opened or reply.calls[-1].status == "unclosed"
        assert len(whole) == 2


class TestBadCalls:
    """Unknown names and broken arguments are kept with their status, and what names no tool stays visible."""

    @pytest.mark.parametrize("call", [xml_call("Raed", path="a.py"), json_call("Raed", {"path": "a.py"})])
    def test_unknown_tool(self, call: str) -> None:
        reply = parse(call, tools=(tool("Read", path={"type": "string"}),))
        assert [(c.name, c.arguments, c.status) for c in reply.calls] == [("Raed", {"path": "a.py"}, "unknown_tool")]

    @pytest.mark.parametrize(
        "arguments",
        [
            '{"s": "say "hi""}',
            '{"path": "a.py"',
            "{path: 1}",
            '"a string"',
            "[1]",
            "null",
            "3",
            '{"path": NaN}',
            '{"path": "\\ud800"}',
            '{"n": ' + "9" * 5000 + "}",
            '{"a":' * 3000 + "1" + "}" * 3000,
        ],
    )
    def test_broken_arguments_keep_their_text(self, arguments: str) -> None:
        text = f'<tool_call>\n{{"name": "Read", "arguments": {arguments}}}\n</tool_call>'
        reply = parse(text)
        assert [(c.name, c.arguments, c.status) for c in reply.calls] == [("Read", arguments, "invalid_arguments")]
        assert reply.calls[0].raw == text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert not reply.truncated

    def test_one_brace_too_many(self) -> None:
        reply = parse('<tool_call>\n{"name": "Read", "arguments": {"path": "a"}}}\n</tool_call>\nand on')
        assert [(c.name, c.status) for c in reply.calls] == [("Read", "invalid_arguments")]
        assert reply.text == "and on"

    def test_a_broken_call_does_not_swallow_the_next(self) -> None:
        for broken in ('{"name": "Read", "arguments": {path}}', "<function=Read>\nplease\n</function>"):
            reply = parse(f"<tool_call>\n{broken}\n</tool_call>\nthen\n{json_call('LS', {})}\nend")
            assert [(c.name, c.status) for c in reply.calls] == [("Read", "invalid_arguments"), ("LS", "ok")]
            assert reply.text == "then\nend"
            assert not reply.ambiguous

    def test_a_model_that_repeats_itself_is_read_in_time(self) -> None:
        """Thousands of calls in one answer cost what they are long, not the square of it."""
        reply = parse("\n".join([xml_call("Read", path="a"), json_call("LS", {}), "<tool_call>{</tool_call>"] * 1500))
        assert len(reply.calls) == 4500

    def test_prose_inside_an_xml_call(self) -> None:
        reply = parse("<tool_call>\n<function=Read>\nplease read a.py\n</function>\n</tool_call>")
        assert [(c.name, c.status) for c in reply.calls] == [("Read", "invalid_arguments")]
        assert reply.calls[0].arguments == "<function=Read>\nplease read a.py\n</function>"

    @pytest.mark.parametrize(
        "body", ["Read(path)", '{"arguments": {}}', '{"name": ""}', '{"name": 3}', "<function=>", ""]
    )
    def test_markup_without_a_name_stays_visible(self, body: str, formats: Mapping[str, TemplateFormat]) -> None:
        text = f"Now:\n<tool_call>\n{body}\n</tool_call>\nDone."
        for chat in (formats["stripping"], formats["headers"]):
            reply = chat.parse(sampled(chat, text), [], TOOLS, truncated=False)
            assert reply.text == text
            assert [(c.name, c.raw, c.status) for c in reply.calls] == [("", f"\n{body}\n", "missing_name")]

    @pytest.mark.parametrize(
        "raw", ['{"name": "LS"}', '{"name": "LS", "arguments": {}}', '{"name": "LS", "parameters": {}}']
    )
    def test_no_arguments(self, raw: str) -> None:
        assert [(c.arguments, c.status) for c in parse(f"<tool_call>{raw}</tool_call>").calls] == [({}, "ok")]

    def test_line_break_inside_a_json_string(self) -> None:
        reply = parse('<tool_call>{"name": "Bash", "arguments": {"command": "a\nb"}}</tool_call>')
        assert [c.arguments for c in reply.calls] == [{"command": "a\nb"}]

    def test_xml_call_without_its_wrapper(self) -> None:
        text = xml_call("Read", path="a").removeprefix("<tool_call>\n")
        for written in (text, text.removesuffix("\n</tool_call>")):
            reply = parse(f"I read.\n{written}")
            assert [(c.name, c.arguments) for c in reply.calls] == [("Read", {"path": "a"})]
            assert reply.text == "I read."
        assert parse("I write <function=Read> in a line.").calls == ()


class TestText:
    """Text around calls is kept; only what templates put between the parts is trimmed."""

    def test_separators(self) -> None:
        a, b = xml_call("LS"), json_call("LS", {})
        assert parse(f"One.\n{a}\n{b}").text == "One."
        assert parse(f"One.\n\n{a}\nTwo.\n{b}\n  Three.\n").text == "One.\n\nTwo.\n  Three.\n"
        assert parse(f"\n\n{a}\n\n").text == ""
        assert parse(" \n Kept.  \n").text == " \n Kept.  \n"

    def test_prose_about_the_marker_is_text(self) -> None:
        text = "The model writes `<tool_call>` and then `</tool_call>` around {json}."
        assert parse(text) == Reply(text)

    @pytest.mark.parametrize("name", ["stripping", "xml", "embedded"])
    def test_markers_spelled_in_ordinary_tokens_are_text(
        self, formats: Mapping[str, TemplateFormat], name: str
    ) -> None:
        chat = formats[name]
        text = f"<think>no</think> {json_call('LS', {})}"
        reply = chat.parse([*chat.encode(text), chat.stop_token_ids[0]], [], TOOLS, truncated=False)
        assert reply == Reply(text)

    def test_stop_token_is_not_in_the_text(self, formats: Mapping[str, TemplateFormat]) -> None:
        for chat in formats.values():
            reply = chat.parse([*chat.encode("Bye."), *chat.stop_token_ids], [], (), truncated=False)
            assert reply == Reply("Bye.")

    def test_bytes_that_are_no_text(self, formats: Mapping[str, TemplateFormat]) -> None:
        chat = formats["embedded"]
        ids = chat.encode("ok é")[:-1]
        assert chat.parse(ids, [], (), truncated=True).text == "ok \ufffd"


MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<function=LS>",
    "<function=",
    "</function>",
    "<parameter=path>",
    "</parameter>",
]
PIECES = [*MARKUP, "<think>", "</think>", "\n", " ", '{"name": "LS", "arguments": ', "{}", "}", '"', "x", "é\U0001f600"]


@few
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.booleans(), st.booleans())
@example(["<tool_call>", "<tool_call>"], True, False)
def test_nothing_that_is_written_raises_or_is_invented(parts: list[str], thought_open: bool, cut: bool) -> None:
    text = "".join(parts)
    reply = parse(text, thought_open=thought_open, cut=cut)
    assert reply.reasoning in text
    assert all(line in text for line in reply.text.split("\n"))
    assert all(c.raw in text for c in reply.calls)
    assert all(isinstance(c.arguments, str) == (c.status not in ("ok", "unknown_tool")) for c in reply.calls)
    assert reply.truncated == (cut or any(c.status == "unclosed" for c in reply.calls))
