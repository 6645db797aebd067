"""The forms of tool calls that popular models write: whole, several, cut, broken, and with the markup in a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.chat import xml_calls
from sandlot.chat.format import TemplateFormat
from sandlot.chat.forms import FORMS, detect_form
from sandlot.chat.markup import Markup
from sandlot.chat.messages import Message, Reply
from sandlot.chat.native_ids import answer_with_sampled_ids
from sandlot.chat.parse import parse_reply
from support.call_forms import (
    SAMPLED,
    TOOLS,
    WRITERS,
    Calls,
    Writer,
    conceal,
    elements,
    json_list,
    mistral_named,
    reveal,
    tool,
    xtml,
)
from support.profiles import few

every = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)


SAMPLED_FORMS = ("json", "python", "gemma", "xtml", "minimax-m3")


def markup_of(form: str) -> Markup:
    alias = conceal if form in SAMPLED_FORMS else str
    return Markup(
        "<think>", "</think>", "<tool_call>", "</tool_call>",
        calls_are_tokens=False, xml=False, form=form, alias=alias,
    )  # fmt: skip


def parse(form: str, text: str, *, cut: bool = False, thought_open: bool = False) -> Reply:
    return parse_reply(
        text, thought_open=thought_open, markup=markup_of(form), tools=TOOLS, truncated=cut, reveal=reveal
    )


def seen(reply: Reply) -> list[tuple[str, object, str]]:
    return [(c.name, c.arguments, c.status) for c in reply.calls]


ONE: Calls = [("Bash", {"command": "ls -l", "timeout": 5})]
TWO: Calls = [*ONE, ("Write", {"path": "é.py", "content": 'x = "1"\n\ny'})]


@every
class TestWhole:
    @pytest.mark.parametrize("calls", [ONE, TWO, [("LS", {})], [("LS", {}), *TWO]])
    def test_every_call_comes_back(self, writer: Writer, calls: Calls) -> None:
        reply = parse(writer.form, writer.write(calls))
        assert seen(reply) == [(n, a, "ok") for n, a in calls]
        assert (reply.text, reply.truncated, reply.ambiguous) == ("", False, False)
        assert all(c.raw and c.raw in reveal(writer.write(calls)) for c in reply.calls)

    def test_text_and_thought_around_it(self, writer: Writer) -> None:
        before = "I look.\n" if writer.text_before else ""
        reply = parse(writer.form, f"<think>\nplan\n</think>\n\n{before}{writer.write(TWO)}")
        assert (reply.reasoning, reply.text) == ("plan", before.strip())
        assert [c.status for c in reply.calls] == ["ok", "ok"]

    def test_a_call_ends_a_thought_that_was_not_closed(self, writer: Writer) -> None:
        if not writer.text_before:
            return
        reply = parse(writer.form, f"look first\n{writer.write(ONE)}", thought_open=True)
        assert (reply.reasoning, seen(reply)) == ("look first", [(*ONE[0], "ok")])

    def test_unknown_tool_is_kept(self, writer: Writer) -> None:
        reply = parse(writer.form, writer.write([("Raed", {"path": "a"})]))
        assert seen(reply) == [("Raed", {"path": "a"}, "unknown_tool")]

    def test_plain_text_is_text(self, writer: Writer) -> None:
        for text in ("Done.", '{"answer": 1}', "use <tool_call> here", "", "a\n\nb"):
            assert parse(writer.form, text) == Reply(text)


@every
@pytest.mark.parametrize("other", WRITERS)
def test_a_value_that_holds_markup_is_not_cut(writer: Writer, other: str) -> None:
    """Also its own: agents edit parsers and chat templates."""
    quoted = reveal(WRITERS[other].write(TWO))
    for value in (quoted, f"before\n{quoted}\nafter", quoted[len(quoted) // 2 :], quoted[: len(quoted) // 2]):
        calls: Calls = [("Write", {"content": value, "path": "p"}), ("LS", {})]
        reply = parse(writer.form, writer.write(calls))
        if reply.ambiguous:  # half of the form's own raw markup has no one reading, and that is said
            assert WRITERS[other].form == writer.form
            assert writer.form in ("glm", "minimax", "dsml")
            continue
        assert seen(reply) == [(n, a, "ok") for n, a in calls]
        assert reply.text == ""


@every
def test_cut_anywhere_no_call_looks_whole_that_is_not(writer: Writer) -> None:
    """At the token limit, at every character: a prefix of the calls, then at most one that is `unclosed`."""
    whole = writer.write(TWO)
    for end in range(len(whole)):
        reply = parse(writer.form, whole[:end], cut=True)
        ok = [c for c in reply.calls if c.status != "unclosed"]
        assert [(c.name, c.arguments, c.status) for c in ok] == [(n, a, "ok") for n, a in TWO[: len(ok)]], whole[:end]
        assert [c.status for c in reply.calls[len(ok) :]] in ([], ["unclosed"])
        assert reply.truncated


NO_JSON = ("glm", "minimax", "dsml", "python", "gemma", "xtml", "minimax-m3")
JSON_FORMS = [n for n in WRITERS if WRITERS[n].form not in NO_JSON]


@pytest.mark.parametrize("name", JSON_FORMS)
def test_broken_json_is_passed_on_as_text(name: str) -> None:
    writer = WRITERS[name]
    text = writer.write(ONE).replace('"ls -l"', '"say "hi""')
    reply = parse(writer.form, text)
    assert [(c.name, c.status) for c in reply.calls] == [("Bash", "invalid_arguments")]
    arguments = reply.calls[0].arguments
    assert isinstance(arguments, str)
    assert 'say "hi"' in arguments
    assert not reply.truncated


@pytest.mark.timeout(20)
@pytest.mark.parametrize("blank", [" ", "\n", "\t", " \n", "a ", "`", "```json ", "{"])
@pytest.mark.parametrize("before", ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<tool_call>", "[TOOL_CALLS]", ""])
def test_long_runs_take_no_time(before: str, blank: str) -> None:
    for form in FORMS:
        for end in ("", "`x", "<｜tool▁call▁end｜>", "</tool_call>"):
            parse(form, f"{before}{blank * 5000}{end}")


@pytest.mark.timeout(20)
def test_ids_are_found_in_time_and_only_with_their_numbers() -> None:
    new = [Message("tool", "done", tool_name=name, tool_call_id="1") for name in ("Bash", "LS")]
    for output, ids in (
        (
            "<|tool_call_begin|>functions.LS:1<|x|>{}<|y|>\n functions.Bash:0<|x|>",
            ["functions.Bash:0", "functions.LS:1"],
        ),
        ("functions." * 50_000 + " functions.LS: functions.:3 LS:4", ["functions.Bash:0", "functions.LS:0"]),
    ):
        assert [message.tool_call_id for message in answer_with_sampled_ids(new, output)] == ids
    late = [Message("tool", "done", tool_name="LS", tool_call_id=f"call_x_{k}") for k in (10, 0, 2)]
    found = answer_with_sampled_ids(late, "functions.LS:3<|x|>{} functions.LS:4<|x|>{} functions.LS:5<|x|>")
    assert [message.tool_call_id for message in found] == ["functions.LS:5", "functions.LS:3", "functions.LS:4"]


@every
@pytest.mark.parametrize(
    "number", ["1e999", "-1e400", "NaN", "Infinity", "[" * 500 + "]" * 500, '{"a":' * 900 + "{}" + "}" * 900]
)
def test_what_no_json_can_hold_or_nobody_can_walk_is_text(writer: Writer, number: str) -> None:
    text = writer.write([("LS", {"size": {"n": "#"}})])
    for quote in ('"', "'", SAMPLED['<|"|>'], ""):
        text = text.replace(f"{quote}#{quote}", number)
    tools = (tool("LS", size={"type": "object"}),)
    markup = markup_of(writer.form)
    reply = parse_reply(text, thought_open=False, markup=markup, tools=tools, truncated=False, reveal=reveal)
    (call,) = reply.calls
    assert call.name == "LS"
    assert reply.as_message().digest
    size = call.arguments if isinstance(call.arguments, str) else call.arguments["size"]
    assert number in (size["n"] if isinstance(size, dict) else size)


@pytest.mark.parametrize("name", ["kimi", "deepseek v3", "deepseek v3.1", "mistral named"])
def test_a_broken_call_leaves_the_next_whole(name: str) -> None:
    writer = WRITERS[name]
    text = writer.write([("Bash", {"command": "#"}), ("LS", {}), *ONE]).replace('"#"', "oops")
    assert [(c.name, c.status) for c in parse(writer.form, text).calls] == [
        ("Bash", "invalid_arguments"),
        ("LS", "ok"),
        ("Bash", "ok"),
    ]


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("glm-4.5", "\n</tool_call>"),
        ("minimax", "\n</invoke>"),
        ("kimi", "<|tool_call_end|>"),
        ("deepseek v3.1", "<｜tool▁call▁end｜>"),
        ("glm-4.5", "</arg_value>"),
        ("minimax", "</parameter>"),
    ],
)
def test_a_forgotten_close_tag_costs_nothing(name: str, close: str) -> None:
    writer = WRITERS[name]
    text = writer.write([*ONE, ("LS", {})])
    reply = parse(writer.form, text.replace(close, "", 1))
    got = [
        (c.name, {k: v.strip() if isinstance(v, str) else v for k, v in dict(c.arguments).items()}, c.status)  # type: ignore[arg-type]
        for c in reply.calls
    ]
    assert got == [(*ONE[0], "ok"), ("LS", {}, "ok")]


@pytest.mark.parametrize(
    ("form", "text", "status"),
    [
        ("glm", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "missing_name"),
        ("glm", "<tool_call>Bash\n<arg_key>a\n</tool_call>", "invalid_arguments"),
        ("minimax", "<minimax:tool_call>\nls\n</minimax:tool_call>", "missing_name"),
        ("minimax", '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>', "missing_name"),
        ("kimi", "<|tool_calls_section_begin|>ls<|tool_calls_section_end|>", "missing_name"),
        ("kimi", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>", "missing_name"),
        ("kimi", "<|tool_call_begin|>functions.Bash:0<|tool_call_end|>", "invalid_arguments"),
        ("kimi", "<|tool_calls_section_begin|>", "unclosed"),
        ("deepseek", "<｜tool▁call▁begin｜>Bash{}<｜tool▁call▁end｜>", "missing_name"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>Bash\n```json\n{}", "unclosed"),
        ("mistral", "[TOOL_CALLS] I call", "missing_name"),
        ("mistral", "[TOOL_CALLS]", "unclosed"),
        ("mistral", "[TOOL_CALLS][]", "missing_name"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]', "missing_name"),
        ("json", "<|START_ACTION|>[]<|END_ACTION|>", "missing_name"),
        ("json", '<|START_ACTION|>[{"parameters": {}}]<|END_ACTION|>', "missing_name"),
        ("json", '<|tools_prefix|>[{"LS": [1]}]<|tools_suffix|>', "invalid_arguments"),
        ("python", "<|tool_call_start|>[]<|tool_call_end|>", "missing_name"),
        ("python", "<|tool_call_start|>", "unclosed"),
        ("python", "<|tool_call_start|>[LS('a')]<|tool_call_end|>", "invalid_arguments"),
        ("python", "<|tool_call_start|>[LS(a=1, a=2)]<|tool_call_end|>", "invalid_arguments"),
        ("python", "<|tool_call_start|>[LS(a='x)]<|tool_call_end|>", "invalid_arguments"),
        ("python", "<|tool_call_start|>[LS(a='x)]", "unclosed"),
        ("python", "write <function_calls> around them", None),
        ("gemma", "<|tool_call>{}<tool_call|>", "missing_name"),
        ("gemma", "<|tool_call>call:LS<tool_call|>", "invalid_arguments"),
        ("gemma", '<|tool_call>call:LS{a:<|"|>x}<tool_call|>', "invalid_arguments"),
        ("gemma", "<|tool_call>call:LS{a:", "unclosed"),
        ("gemma", "<|tool_call>call:LS{a:1}", "unclosed"),
        ("xtml", "<|open|>tools<|sep|>ls<|close|>tools<|sep|>", "missing_name"),
        ("xtml", '<|open|>tools<|sep|><|open|>call tool="LS" index="1"<|sep|>', "unclosed"),
        ("minimax-m3", "]<]minimax[>[<tool_call>ls]<]minimax[>[</tool_call>", "missing_name"),
        ("minimax-m3", ']<]minimax[>[<invoke name="LS">]<]minimax[>[<a>1]<]minimax[>[</b>', "invalid_arguments"),
        ("minimax-m3", ']<]minimax[>[<invoke name="LS">]<]minimax[>[<a>1', "unclosed"),
        ("llama", "<|python_tag|>print(1)", "missing_name"),
        ("llama", '{"name": 1, "parameters": {}}', None),
        ("llama", '{"name": "x"}', None),
        ("llama", '{"name": "nobody", "parameters": {}} is what I would write', None),
    ],
)
def test_what_names_no_tool_or_has_no_end(form: str, text: str, status: str | None) -> None:
    reply = parse(form, conceal(text) if form in SAMPLED_FORMS else text)
    assert [c.status for c in reply.calls] == ([status] if status else [])
    if status in (None, "missing_name"):
        assert reply.text == text  # the agent sees what was written
    assert reply.truncated is (status == "unclosed")


def test_mistral_calls_with_an_id_and_text_after_a_list() -> None:
    reply = parse("mistral", '[TOOL_CALLS]Bash[CALL_ID]abcdefghi[ARGS]{"command": "ls"}')
    assert seen(reply) == [("Bash", {"command": "ls"}, "ok")]
    reply = parse("mistral", 'Hm.[TOOL_CALLS] [{"name": "LS", "arguments": {}}]\nThat is all.')
    assert (reply.text, seen(reply)) == ("Hm.\nThat is all.", [("LS", {}, "ok")])


def test_json_between_markers_ends_at_their_end_also_when_it_is_broken() -> None:
    broken = json_list(ONE).replace('"ls -l"', '"say "hi""')
    reply = parse("json", f"Hm.\n{broken}\nThat is all.")
    assert (reply.text, [(c.name, c.status) for c in reply.calls]) == (
        "Hm.\nThat is all.",
        [("Bash", "invalid_arguments")],
    )
    for text in ("I write <tool_calls> around them.", "<TOOLCALL>\nlike so\n</TOOLCALL>"):
        assert parse("json", text) == Reply(text)


@pytest.mark.parametrize("name", ["mistral", "json list"])
def test_an_element_without_a_name_is_shown_beside_its_calls(name: str) -> None:
    writer = WRITERS[name]
    text = writer.write([*ONE, ("LS", {}), *ONE]).replace('"name": "LS"', '"nmae": "LS"')
    reply = parse(writer.form, f"Hm.\n{text}")
    assert [(c.name, c.status) for c in reply.calls] == [("Bash", "ok"), ("", "missing_name"), ("Bash", "ok")]
    assert reply.text == f"Hm.\n{reply.calls[1].raw}"
    assert '"nmae": "LS"' in reply.calls[1].raw


def test_strings_in_python_calls() -> None:
    """As Python has them; with line breaks; and as templates write them, who put quotes around any text."""
    for written, value, ambiguous in (
        (r"'it\'s\n\t\x41\u00e9\\'", "it's\n\tAé\\", False),
        (r'"a \d"', r"a \d", False),
        ("'two\nlines'", "two\nlines", False),
        ("'it's here'", "it's here", True),
    ):
        reply = parse("python", conceal(f"<|tool_call_start|>[Bash(command={written}, timeout=5)]<|tool_call_end|>"))
        assert seen(reply) == [("Bash", {"command": value, "timeout": 5}, "ok")]
        assert reply.ambiguous is ambiguous
    values = "[True, false, None, -1.5, {'a': [1]}]"
    reply = parse("python", f"<function_calls>\nLS(a={values})\nLS(b=[])\n</function_calls>")
    assert seen(reply) == [("LS", {"a": [True, False, None, -1.5, {"a": [1]}]}, "ok"), ("LS", {"b": []}, "ok")]


def test_words_without_quotes_in_gemma_calls() -> None:
    text = '<|tool_call>call:Bash{command:ls -l a:b,timeout:5,other:[true,null,"x"]}<tool_call|>'
    assert seen(parse("gemma", conceal(text))) == [
        ("Bash", {"command": "ls -l a:b", "timeout": 5, "other": [True, None, "x"]}, "ok")
    ]


def test_names_in_xtml_calls_are_unescaped() -> None:
    calls: Calls = [("a&amp;b", {"k &quot;x&quot;": "&amp; stays", "n": 5})]
    assert seen(parse("xtml", xtml(calls))) == [("a&b", {'k "x"': "&amp; stays", "n": 5}, "unknown_tool")]


def test_elements_are_what_the_schema_says() -> None:
    todo = {"type": "object", "properties": {"text": {"type": "string"}, "done": {"type": "boolean"}}}
    tools = (
        tool(
            "Todo",
            items={"type": "array", "items": {"$ref": "#/$defs/todo"}},
            empty={"anyOf": [{"type": "array"}, {"type": "null"}]},
            none={"type": "object"},
            text={"type": "string"},
        ),
    )
    tools[0].parameters["$defs"] = {"todo": todo}
    given: dict[str, object] = {
        "items": [{"text": "5", "done": True}, {"text": " a\n", "done": False}],
        "empty": [], "none": {}, "text": "7", "other": [1, {"deep": ["x"]}],
    }  # fmt: skip
    reply = parse_reply(
        elements([("Todo", given)]), thought_open=False, markup=markup_of("minimax-m3"), tools=tools, truncated=False
    )
    assert seen(reply) == [("Todo", {**given, "other": ["1", {"deep": ["x"]}]}, "ok")]
    mark = SAMPLED["]<]minimax[>["]
    twice = f'{mark}<invoke name="LS">{mark}<a>1{mark}</a>{mark}<a>2{mark}</a>{mark}</invoke>'
    assert seen(parse("minimax-m3", twice)) == [("LS", {"a": ["1", "2"]}, "ok")]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("gemma", '<|tool_call>call:LS{a:<|"|>x'),
        ("python", "<|tool_call_start|>[LS(a='x"),
        ("python", "<|tool_call_start|>[LS(a='x'"),
        ("xtml", '<|open|>call tool="LS" index="1"<|sep|>'),
        ("minimax-m3", ']<]minimax[>[<invoke name="LS">]<]minimax[>[<a>'),
    ],
)
def test_thousands_of_broken_calls_take_linear_time(form: str, unit: str) -> None:
    assert len(parse(form, conceal(unit) * 3_000).calls) >= 30


PIECES = sorted(
    {
        piece
        for name in WRITERS
        for piece in [WRITERS[name].write(ONE)[:k] for k in (5, 12, 30)]
        + ["</tool_call>", "<arg_key>", "</arg_value>", "[ARGS]", "{", "}", "]", '"', "\n", " ", "</invoke>", ";", "x"]
    }
)


@every
@few
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans(), st.booleans())
def test_any_text_is_read(writer: Writer, text: str, cut: bool, is_open: bool) -> None:
    """No text raises, and nothing of it is in both the text and a call that is sent."""
    reply = parse(writer.form, text, cut=cut, thought_open=is_open)
    assert all(c.status in ("ok", "unknown_tool") for c in reply.calls if isinstance(c.arguments, dict))
    assert reply.truncated or not any(c.status == "unclosed" for c in reply.calls)
    assert len(reply.text) + len(reply.reasoning) <= len(reveal(text))


def test_thousands_of_calls_take_linear_time() -> None:
    for writer in WRITERS.values():
        calls: Calls = [("Write", {"path": "p", "content": f"{k}"}) for k in range(1000)]
        assert len(parse(writer.form, writer.write(calls)).calls) == 1000


class TestDetection:
    @pytest.mark.parametrize(
        ("template", "vocabulary", "form"),
        [
            ("<tool_call>", {"<|python_tag|>"}, "tagged"),
            ("<tool_call>{{name}}<arg_key>", set(), "glm"),
            ("{{ x }}", {"<tool_call>", "<arg_key>"}, "glm"),
            ("{{ x }}", {"<|python_tag|>"}, "llama"),
            ("[TOOL_CALLS]", {"<tool_call>"}, "mistral"),
            ("", {"<|tool_call_argument_begin|>"}, "kimi"),
            ("<｜tool▁call▁begin｜>", set(), "deepseek"),
            ("<minimax:tool_call>", set(), "minimax"),
            ("{{ '<|open|>' + tag }}", {"<think>"}, "xtml"),
            ("{%- set ns = ']<]minimax[>[' %}<tool_call>", set(), "minimax-m3"),
            ("<|tool_call>call:", set(), "gemma"),
            ("<|tool_call|>", set(), "json"),
            ("{{ x }}", {"<|tool_call_start|>"}, "python"),
            ("{{ x }}", {"<|START_ACTION|>"}, "json"),
            ("", set(), "tagged"),
        ],
    )
    def test_the_template_decides_first(self, template: str, vocabulary: set[str], form: str) -> None:
        assert detect_form(template, vocabulary) == form
        assert form in FORMS

    @pytest.mark.parametrize(("shape", "form"), [("paired", "mistral"), ("headers", "tagged"), ("xml", "tagged")])
    def test_of_a_loaded_template(self, formats: Mapping[str, TemplateFormat], shape: str, form: str) -> None:
        assert formats[shape].markup.form == form


def test_markers_that_are_tokens_are_not_found_in_text(formats: Mapping[str, TemplateFormat]) -> None:
    """A call begins where the control token was sampled, not where a text spells it."""
    chat, text = formats["paired"], mistral_named(ONE)
    spelled = chat.parse(chat.encode(text), (), TOOLS, truncated=False)
    assert (spelled.text, spelled.calls) == (text, ())
    meant = chat.parse(chat.tokenizer.encode(chat.tokenizer.conceal(text)), (), TOOLS, truncated=False)
    assert seen(meant) == [(*ONE[0], "ok")]


@pytest.mark.parametrize(
    ("form", "unit"),
    [("tagged", "<function=Bash>\n<parameter=command>\n"), ("glm", "<tool_call>Bash<arg_key>a</arg_key><arg_value>")],
)
def test_many_calls_without_end_take_effort_in_their_length(
    monkeypatch: pytest.MonkeyPatch, form: str, unit: str
) -> None:
    """Each call may be searched for its best reading, but all of a reply together only so long."""
    looked = [0]
    ends = xml_calls._Search._ends

    def counted(*args: Any, **kwargs: Any) -> Any:
        looked[0] += 1
        return ends(*args, **kwargs)

    monkeypatch.setattr(xml_calls._Search, "_ends", counted)
    markup = Markup("<think>", "</think>", "<tool_call>", "</tool_call>", calls_are_tokens=False, xml=True, form=form)
    for count in (400, 800):
        looked[0] = 0
        reply = parse_reply(unit * count, thought_open=False, markup=markup, tools=TOOLS, truncated=False)
        assert len(reply.calls) > count / 2
        assert looked[0] < 40 * count
