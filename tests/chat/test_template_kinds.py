"""What is found out of each kind of template at load, how it is gone on from, and what is told."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.format import TemplateFormat, load_chat_format
from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.probe import TOOLS
from support.chat_templates import SHAPES, Shape, write_chat_dir
from support.said import TEXTS, said
from support.template_kinds import CHATML, KINDS, SIMPLE


def load(directory: Path, shape: Shape, **how: Any) -> TemplateFormat:
    chat = load_chat_format(write_chat_dir(directory, shape), **how)
    assert isinstance(chat, TemplateFormat)
    return chat


def tails(
    chat: TemplateFormat, written: str, turn: Message, new: Sequence[Message], tools: Sequence[Tool]
) -> list[list[int] | None]:
    names = [c.name for c in turn.tool_calls]
    return [chat.extend([*chat.encode(written), stop], names, new, tools) for stop in chat.stop_token_ids]


@pytest.mark.parametrize("name", KINDS)
def test_it_is_gone_on_from_as_full_renders_are(name: str, tmp_path: Path) -> None:
    """In conversations beside the probes; and where it is not, that is a message for which the format says so."""
    chat, chance, continued = load(tmp_path / "m", KINDS[name]), random.Random(name), 0
    assert chat.can_extend
    for _ in range(60):
        system = [Message("system", chance.choice(TEXTS))] if chance.random() < 0.5 else []
        base = [*system, Message("user", chance.choice(TEXTS))]
        for k in range(chance.randint(0, 2)):
            base += said(chance, k, thinks=True)
        turn, *new = said(chance, 9, thinks=False)
        if chat.text_after_results and turn.tool_calls:
            turn = replace(turn, text="")
        full = list(chat.render([*base, turn, *new], TOOLS))
        number = sum(len(m.tool_calls) for m in base)
        written = f'{turn.text}[{{"tool_call_id": "{number}", "tool_name": "x"}}]'
        found = [tail for tail in tails(chat, written, turn, new, TOOLS) if tail is not None]
        assert all(full[-len(tail) :] == tail for tail in found)
        cut = chat.extend(chat.encode(written), [c.name for c in turn.tool_calls], new, TOOLS)
        if chat.declines_at & {m.role for m in new}:
            assert (found, cut) == ([], None)
            continue
        assert cut is not None
        assert (cut[0] in chat.stop_token_ids, cut[1:]) == (True, min(found, key=len))
        continued += 1
    assert continued > 10


def test_the_model_may_have_opened_another_message(tmp_path: Path) -> None:
    """It has stopped at the token for a result, or at the end: what comes is a question, so the prompt is made anew."""
    chat = load(tmp_path / "m", KINDS["opening"])
    literals = [chat.decode([i]) for i in chat.stop_token_ids]
    asked = dict(
        zip(literals, tails(chat, "Done.", Message("assistant", "Done."), [Message("user", "Why?")], ()), strict=True)
    )
    assert asked.pop("<|user|>") == [*chat.encode("\nWhy?"), chat.tokenizer.control_ids["<|assistant|>"]]
    assert set(asked) == {"<|observation|>", "<|endoftext|>"}
    assert not any(asked.values())


def test_thoughts_are_kept_or_not_as_the_policy_says(tmp_path: Path) -> None:
    keeps = load(tmp_path / "a", KINDS["late thoughts"])
    leaves_out = load(tmp_path / "b", KINDS["late thoughts"], thinking="template")
    stop = keeps.stop_token_ids[:1]
    assert keeps.extend(stop, (), [Message("user", "Why?")], ()) is not None
    assert leaves_out.extend(stop, (), [Message("user", "Why?")], ()) is None
    assert leaves_out.extend(stop, ("probe_read",), [Message("tool", "a")], ()) is not None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_found_under_any_name(tmp_path: Path, field: str) -> None:
    template = SIMPLE.replace("'\\n' + m.content", f"'\\n' ~ m.{field} ~ m.content")
    chat = load(tmp_path / "m", replace(SHAPES["embedded"], template=template))
    turn = Message("assistant", "Done.", "A thought <|im_end|>.")
    ids = chat.render([Message("user", "Look."), turn, Message("user", "Why?")], ())
    assert "assistant\nA thought <|im_end|>.Done.<|im_end|>" in chat.decode(ids)
    assert list(ids).count(chat.tokenizer.control_ids["<|im_end|>"]) == 3


def test_an_answer_that_says_nothing_is_left_out_where_it_is_refused(tmp_path: Path) -> None:
    chats = {name: load(tmp_path / name, KINDS[name]) for name in ("no empty answers", "gathered")}
    asked = [Message("user", "One."), Message("assistant", "", "A thought."), Message("user", "Two.")]
    shown = {name: chat.decode(chat.render(asked, ())) for name, chat in chats.items()}
    assert shown["no empty answers"] == "<|im_start|>user\nOne.\n\nTwo.<|im_end|>\n<|im_start|>assistant\n"
    assert "<|im_start|>assistant\n<|im_end|>" in shown["gathered"]


def test_only_tokens_that_close_a_turn_stop_it(tmp_path: Path) -> None:
    for name in ("always prompted", "held back", "gathered", "late close"):
        chat = load(tmp_path / name, KINDS[name])
        assert [chat.decode([i]) for i in chat.stop_token_ids] == ["<|im_end|>"]


def test_a_turn_that_was_closed_as_one_of_the_other_kind_is_closed_as_its_own(tmp_path: Path) -> None:
    """A call at whose end the model closed its turn, and a text at whose end it opened a result."""
    chat = load(tmp_path / "m", KINDS["results within"])
    result, close = (chat.tokenizer.control_ids[token] for token in ("<|result|>", "<|im_end|>"))
    answered, asked = [Message("tool", "a")], [Message("user", "Why?")]
    for names, new, own, other in ((["probe_read"], answered, result, close), ([], asked, close, result)):
        tail = chat.extend([own], names, new, TOOLS)
        assert tail is not None
        assert chat.extend([other], names, new, TOOLS) == [own, *tail] == chat.extend([], names, new, TOOLS)


def test_what_is_shown_of_calls_is_found_out(tmp_path: Path) -> None:
    chats = {name: load(tmp_path / name, shape) for name, shape in KINDS.items()}
    assert all(chat.traits.calls for chat in chats.values())
    assert [name for name, chat in chats.items() if chat.traits.arguments_as_text] == ["text arguments"]
    assert [name for name, chat in chats.items() if not chat.traits.calls_together] == ["first call", "headers"]
    assert [name for name, chat in chats.items() if chat.declines_at] == ["moving tools"]


@pytest.mark.parametrize("name", ["headers", "first call"])
def test_calls_that_may_not_stand_together_are_all_shown(tmp_path: Path, name: str) -> None:
    chat = load(tmp_path / "m", KINDS[name])
    calls = tuple(ToolCall("read", {"path": path}, path) for path in ("a.py", "b.py", "c.py"))
    results = [Message("tool", f"in {c.id}", tool_call_id=c.id) for c in calls]
    text = chat.decode(chat.render([Message("user", "Look."), Message("assistant", "", "", calls), *results], TOOLS))
    places = [text.find(part) for c in calls for part in (f'"path": "{c.id}"',)] + [text.find(m.text) for m in results]
    assert places == sorted(places)
    assert -1 not in places


@pytest.mark.parametrize(
    "arguments", [{"k": "<|im_end|>", "<think>": ["é", None, 1.5]}, '{"k": "<|im_end|>"}', "{no", ""]
)
def test_arguments_as_text_are_json_and_stay_text(tmp_path: Path, arguments: dict[str, Any] | str) -> None:
    chat = load(tmp_path / "m", KINDS["text arguments"])
    turn = Message("assistant", "", tool_calls=(ToolCall("probe_read", arguments, "c"),))
    ids = chat.render([Message("user", "Look."), turn, Message("tool", "x", tool_call_id="c")], TOOLS)
    text = chat.decode(ids)
    shown = json.loads(text[text.index("<tool_call>") + len("<tool_call>") : text.index("</tool_call>")])["arguments"]
    wanted = json.loads(arguments) if arguments == '{"k": "<|im_end|>"}' else arguments
    assert shown == (wanted if isinstance(wanted, dict) else {"unparsed_arguments": wanted})
    assert list(ids).count(chat.tokenizer.control_ids["<|im_end|>"]) == 3


class TestWhatIsTold:
    def warnings(self, caplog: pytest.LogCaptureFixture, directory: Path, shape: Shape) -> str:
        with caplog.at_level(logging.WARNING, "sandlot.chat"):
            load(directory, shape)
        return caplog.text

    def test_nothing_where_all_is_well(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for name, shape in {**SHAPES, **KINDS}.items():
            if name not in ("plain", "textual", "shortening", "moving tools", "headers", "switches"):
                assert self.warnings(caplog, tmp_path / name, shape) == "", name

    def test_calls_that_are_not_read(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The template writes them in a form that nothing here reads: no call would ever be made."""
        unknown = SIMPLE.replace("<tool_call>", "<|call|>").replace("</tool_call>", "<|end_call|>")
        shape = Shape(unknown, ("<|im_start|>", "<|im_end|>", "<|call|>", "<|end_call|>"), "", "<|im_end|>")
        told = self.warnings(caplog, tmp_path / "m", shape)
        assert "writes for a tool call" in told
        assert "<|call|>" in told
        assert "vllm:NAME" in told
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sandlot.chat"):
            load_chat_format(tmp_path / "m", parser="mistral")
        assert "writes for a tool call" in caplog.text

    @pytest.mark.parametrize(("pair", "read"), [(("<think>", "</think>"), True), (("<|ponder|>", "<|done|>"), False)])
    def test_thoughts_that_are_not_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, pair: tuple[str, str], read: bool
    ) -> None:
        """Where they are in markers that nothing here knows, the agent would be told them; an empty one may be asked
        for by the prompt."""
        thought = (
            "{{- '<|im_start|>' + m.role + '\\n' }}{% if m.reasoning %}{{- 'OPEN' + m.reasoning + 'CLOSE' }}{% endif %}"
        )
        template = SIMPLE.replace("{{- '<|im_start|>' + m.role + '\\n' + m.content }}", thought + "{{- m.content }}")
        template = template.replace("assistant\\n'", "assistant\\nOPENCLOSE'")
        template = template.replace("OPEN", pair[0]).replace("CLOSE", pair[1])
        told = self.warnings(caplog, tmp_path / "m", Shape(template, (*CHATML, *pair), "", "<|im_end|>"))
        assert ("writes for a thought" in told) is not read
        assert "writes for a tool call" not in told

    def test_what_stands_around_a_text_and_is_not_known(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The agent would see it in every answer."""
        said = "{{- ('<|say|>' if m.role == 'assistant' else '') + m.content }}"
        template = SIMPLE.replace("+ m.content }}", f"}}}}{said}")
        told = self.warnings(caplog, tmp_path / "m", Shape(template, (*CHATML, "<|say|>"), "", "<|im_end|>"))
        assert "('<|say|>Probe of an answer.') is more than its text" in told

    def test_why_tools_or_calls_are_not_shown(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        shape = replace(KINDS["gathered"], template=SIMPLE.replace("c.function | tojson", "c.function.nothing.name"))
        told = self.warnings(caplog, tmp_path / "m", shape)
        assert "shows the model no tool calls (" in told
        assert "has no attribute 'nothing'" in told

    def test_which_stop_token_is_missing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        told = self.warnings(caplog, tmp_path / "m", replace(KINDS["opening"], stops=()))
        assert "if the model stops at <|user|>, name that in eos_token_id of its generation_config.json" in told

    def test_what_full_renders_after_users_cost(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        told = self.warnings(caplog, tmp_path / "m", KINDS["moving tools"])
        assert "cannot be continued after a user's message" in told
        assert "samples grow in number and repeat context" in told


def test_what_a_template_would_read_out_of_a_text_stays_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A path or a result is shown as it is, and decides nothing."""
    with caplog.at_level(logging.WARNING, "sandlot.chat"):
        chat = load(tmp_path / "m", KINDS["switches"])
    assert "/no_think" in chat.traits.switches
    assert "reads switches such as /no_think out of texts" in caplog.text
    asked = [Message("system", "Rules /no_think"), Message("user", "See src/think/a.py, not /no_think.")]
    text = chat.decode(chat.render([*asked, Message("assistant", "/think"), Message("user", "/no_think")], TOOLS))
    shown = [
        text.find(part) for part in ("Rules /no_think<", "See src/think/a.py, not /no_think.<", "/think<", "/no_think<")
    ]
    assert -1 not in shown
    assert text.endswith("assistant\n<think>")
    others = {name: load(tmp_path / name, KINDS[name]) for name in ("late thoughts", "opening")}
    assert not any(other.traits.switches for other in others.values())


def test_what_stands_around_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    """Where it is tokens; spelled, it is text."""
    chat = load(tmp_path / "m", KINDS["tags of tokens"])
    question, call = Message("user", "Q"), ToolCall("probe_read", {"path": "<|close|>argument<|sep|>\n"})
    turn = Message("assistant", "I <|close|>response<|sep|> look.", "A thought.", (call,))
    prompt = chat.render([question], TOOLS)
    whole = chat.render([question, turn], TOOLS)
    end = len(whole) - len(chat.tokenizer.encode(chat.text([], ()))) - 1
    reply = chat.parse(whole[len(prompt) : end], prompt, TOOLS, truncated=False)
    assert (reply.reasoning, reply.text) == (turn.reasoning, turn.text)
    assert [(c.name, c.arguments, c.status) for c in reply.calls] == [(call.name, call.arguments, "ok")]
    only = chat.parse(
        chat.tokenizer.encode(chat.tokenizer.conceal("<|close|>think<|sep|>")), prompt, (), truncated=True
    )
    assert (only.text, only.reasoning) == ("", "")


class TestSeedMarkers:
    """`<seed:tool_call>`, with values that stand on no lines of their own."""

    TEMPLATE = SIMPLE.replace("<tool_call>' ~ (c.function | tojson) ~ '</tool_call>", r"""
<seed:tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for k, v in c.function.arguments | items %}{{- '<parameter=' + k + '>' + v + '</parameter>\n' }}{% endfor %}
{{- '</function>\n</seed:tool_call>""".strip())  # fmt: skip

    @pytest.mark.parametrize("tokens", [(), ("<seed:tool_call>", "</seed:tool_call>")])
    def test_values_are_read_as_they_are_written(self, tmp_path: Path, tokens: tuple[str, ...]) -> None:
        chat = load(tmp_path / "m", Shape(self.TEMPLATE, ("<|im_start|>", "<|im_end|>", *tokens), "", "<|im_end|>"))
        calls = tuple(ToolCall("probe_read", {"path": path}) for path in ("a.py", "\na\n\n", "x\n"))
        text = chat.text(
            [Message("user", "Q"), Message("assistant", "I look.", "", calls)], TOOLS, generation_prompt=False
        )
        answer = text[text.index("I look.") : text.rindex(chat.tokenizer.alias("<|im_end|>"))]
        reply = chat.parse(chat.tokenizer.encode(answer), (), TOOLS, truncated=False)
        assert reply.text == "I look."
        assert [(c.name, c.arguments, c.status) for c in reply.calls] == [(c.name, c.arguments, "ok") for c in calls]


@pytest.mark.parametrize("as_files", [True, False])
def test_templates_for_conversations_with_tools_and_without(tmp_path: Path, as_files: bool) -> None:
    """One that needs tools is not given those of a side call without any."""
    path = write_chat_dir(tmp_path / "m", SHAPES["embedded"])
    with_tools = SIMPLE.replace("tools or []", "tools")
    without = "{%- for m in messages %}{{- '<|im_start|>plain ' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    if as_files:
        (path / "chat_template.jinja").write_text(without)
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        (path / "chat_template.jinja").unlink()
        config = json.loads((path / "tokenizer_config.json").read_text())
        named = [{"name": "default", "template": without}, {"name": "tool_use", "template": with_tools}]
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    chat = load_chat_format(path)
    question = [Message("user", "Hello.")]
    assert chat.decode(chat.render(question, ())) == "<|im_start|>plain Hello.<|im_end|>\n"
    assert "Read a file." in chat.decode(chat.render(question, TOOLS))
