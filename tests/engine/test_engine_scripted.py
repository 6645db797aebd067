"""The scripted policy writes the turn that is due, in the token ids of its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sandlot.engine import SamplingParams
from sandlot.engine.backend import Request
from sandlot.engine.scripted.backend import ScriptedBackend
from sandlot.engine.scripted.policy import logprob, split_at
from sandlot.engine.scripted.script import read_scripts
from sandlot.errors import ConfigError, ModelError
from support.toy_model import chat_template, make_toy_model

SCRIPT: dict[str, Any] = {
    "scripts": [
        {
            "match": "Fix the parser",
            "steps": [
                {"reasoning": "I look first.", "calls": [{"tool": "bash", "arguments": {"command": "ls -la"}}]},
                {
                    "text": "Two at once.",
                    "calls": [
                        {"tool": "read", "arguments": {"path": "a.py"}},
                        {"tool": "bash", "arguments": {"command": "echo 'é' \"q\""}},
                    ],
                },
                {"text": "The parser is fixed."},
            ],
        },
        {"match": "Fix the parser of dates", "steps": [{"text": "Dates it is."}]},
    ],
    "fallback": {"text": "Nothing to do."},
}
TOOLS = [{"name": "Bash"}, {"name": "Read"}]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


class Chat:
    """A conversation with the policy: prompts are rendered by the template, or continued by ids."""

    def __init__(self, model: Path, script: Any, directory: Path) -> None:
        (directory / "script.json").write_text(json.dumps(script))
        self.backend = ScriptedBackend.load(model, directory / "script.json")
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(chat_template())

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        return self.encode(self.template.render(messages=messages, tools=tools, add_generation_prompt=True))

    async def ask(self, prompt: list[int], **sampling: Any) -> tuple[list[int], str]:
        done = await self.backend.generate(Request("r", tuple(prompt), SamplingParams(**sampling)))
        assert len(done.output_ids) == len(done.logprobs)
        assert all(-20 < p < 0 for p in done.logprobs)
        return list(done.output_ids), self.tokenizer.decode(list(done.output_ids), skip_special_tokens=False)


@pytest.fixture
def chat(toy: Path, tmp_path: Path) -> Chat:
    return Chat(toy, SCRIPT, tmp_path)


USER = {"role": "user", "content": "Please: Fix the parser now"}
TURNS = [
    '<think>\nI look first.\n</think>\n\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls -la"}}\n'
    "</tool_call><|im_end|>",
    'Two at once.\n<tool_call>\n{"name": "Read", "arguments": {"path": "a.py"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "Bash", "arguments": {"command": "echo \'é\' \\"q\\""}}\n</tool_call><|im_end|>',
    "The parser is fixed.<|im_end|>",
    "Nothing to do.<|im_end|>",
]


async def test_the_turns_come_in_order_when_the_prompt_is_continued_by_ids(chat: Chat) -> None:
    prompt = chat.prompt([{"role": "system", "content": "You are an agent."}, USER], TOOLS)
    for turn in TURNS:
        ids, text = await chat.ask(prompt)
        assert text == turn
        prompt += [*ids, *chat.encode("\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n")]
        prompt += chat.encode("<|im_start|>assistant\n")


async def test_the_turns_come_in_order_when_the_history_is_written_anew(chat: Chat) -> None:
    messages = [{"role": "system", "content": "You are an agent."}, USER]
    for k, turn in enumerate(TURNS):
        _, text = await chat.ask(chat.prompt(messages, TOOLS))
        assert text == turn
        # The client drops the thinking and rewrites the text; the turn still counts.
        messages += [{"role": "assistant", "content": f"reworded {k}"}, {"role": "tool", "content": "ok"}]


async def test_turns_before_the_task_was_named_do_not_count(chat: Chat) -> None:
    before = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]
    _, text = await chat.ask(chat.prompt([*before, USER], TOOLS))
    assert text == TURNS[0]


async def test_a_header_that_is_only_text_does_not_count(chat: Chat) -> None:
    prompt = chat.prompt([USER], TOOLS)
    at = prompt.index(chat.tokenizer.token_to_id("<|im_end|>"), len(prompt) // 2)
    plain = [i for c in "<|im_start|>assistant\n" for i in chat.encode(c)]
    _, text = await chat.ask([*prompt[:at], *plain, *prompt[at:]])
    assert text == TURNS[0]


async def test_the_longest_match_wins_and_no_match_falls_back(chat: Chat) -> None:
    for content, turn in (("Fix the parser of dates", "Dates it is."), ("Something else", "Nothing to do.")):
        _, text = await chat.ask(chat.prompt([{"role": "user", "content": content}], TOOLS))
        assert text == turn + "<|im_end|>"


async def test_a_call_of_a_tool_that_is_not_offered_is_not_made(chat: Chat) -> None:
    # As in a side call that names the task but brings no tools.
    for tools in (None, [{"name": "Edit"}]):
        _, text = await chat.ask(chat.prompt([USER], tools))
        assert text == "Nothing to do.<|im_end|>"


async def test_a_thinking_block_that_the_prompt_opened_is_closed(chat: Chat) -> None:
    prompt = [*chat.prompt([USER], TOOLS), *chat.encode("<think>\n")]
    _, text = await chat.ask(prompt)
    assert text == TURNS[0].removeprefix("<think>\n")


async def test_max_tokens_and_stop_tokens_cut_a_turn(chat: Chat) -> None:
    prompt = chat.prompt([USER], TOOLS)
    whole, _ = await chat.ask(prompt)
    request = Request("r", tuple(prompt), SamplingParams(max_tokens=5))
    cut = await chat.backend.generate(request)
    assert (list(cut.output_ids), cut.finish_reason, cut.stop_reason) == (whole[:5], "length", None)
    exact = await chat.backend.generate(Request("r", tuple(prompt), SamplingParams(max_tokens=len(whole))))
    assert (list(exact.output_ids), exact.finish_reason) == (whole, "stop")
    stop = chat.tokenizer.token_to_id("<tool_call>")
    stopped = await chat.backend.generate(Request("r", tuple(prompt), SamplingParams(stop_token_ids=(stop,))))
    assert (stopped.output_ids[-1], stopped.finish_reason, stopped.stop_reason) == (stop, "stop", stop)


async def test_some_turns_are_tokenized_as_the_tokenizer_would_not(toy: Path, tmp_path: Path) -> None:
    text = "The function returns the wrong result, so the tests fail; hello world. " * 4
    scripts = [{"match": f"task {k:02}", "steps": [{"text": f"{k} {text}"}]} for k in range(12)]
    chat = Chat(toy, {"scripts": scripts}, tmp_path)
    odd = 0
    for k in range(12):
        prompt = chat.prompt([{"role": "user", "content": f"task {k:02}"}])
        ids, written = await chat.ask(prompt)
        assert written == f"{k} {text}<|im_end|>"
        assert (await chat.ask(prompt))[0] == ids
        odd += chat.encode(written) != ids
    assert 0 < odd < 12


async def test_a_rescoring_gives_the_same_logprobs(chat: Chat) -> None:
    prompt = chat.prompt([USER], TOOLS)
    done = await chat.backend.generate(Request("r", tuple(prompt), SamplingParams()))
    whole = (*prompt, *done.output_ids)
    scored = await chat.backend.generate(Request("r", whole, SamplingParams(max_tokens=1), score_prompt=True))
    assert scored.prompt_logprobs is not None
    assert list(scored.prompt_logprobs[len(prompt) :]) == list(done.logprobs)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0.01, 5))
def test_logprobs_are_finite_and_negative_at_every_temperature(before: int, token: int, temperature: float) -> None:
    value = logprob(before, token, temperature)
    assert -1000 < value <= 0
    assert -4 < logprob(before, token) < 0


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(4, 9), max_size=5), min_size=1, max_size=5))
def test_splitting_finds_every_header(parts: list[list[int]]) -> None:
    header = [1, 2, 1, 3]
    joined = parts[0][:]
    for part in parts[1:]:
        joined += [*header, *part]
    assert [list(p) for p in split_at(joined, header)] == parts


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("{", "not valid"),
        ({}, "scripts"),
        ({"scripts": [{"match": "", "steps": []}]}, "match"),
        ({"scripts": [{"match": "a", "steps": [{"txt": "x"}]}]}, "txt"),
        ({"scripts": [{"match": "a", "steps": [{"calls": [{"tool": ""}]}]}]}, "tool"),
        ({"scripts": [{"match": "a", "steps": []}] * 2}, "two scripts match 'a'"),
        ({"scripts": [], "fallback": {"calls": [{"tool": "bash"}]}}, "fallback"),
    ],
)
def test_a_wrong_script_file_is_refused_with_the_place(tmp_path: Path, script: Any, says: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(script if isinstance(script, str) else json.dumps(script))
    with pytest.raises(ConfigError, match=says):
        read_scripts(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scripts(tmp_path / "absent.json")


def test_a_model_without_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "s.json"
    script.write_text('{"scripts": []}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ScriptedBackend.load(tmp_path, script)
    model = make_toy_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ModelError, match="no assistant header"):
        ScriptedBackend.load(model, script)
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ModelError, match="cannot be rendered"):
        ScriptedBackend.load(model, script)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        ScriptedBackend.load(model, script)


@pytest.mark.parametrize(
    ("tool", "argument"), [("run_shell_command", "command"), ("exec_command", "cmd"), ("shell", "command")]
)
async def test_a_shell_by_another_name(chat: Chat, tool: str, argument: str) -> None:
    _, text = await chat.ask(chat.prompt([USER], [{"name": "write"}, {"name": tool}]))
    assert f'{{"name": "{tool}", "arguments": {{"{argument}": "ls -la"}}}}' in text


async def test_an_agent_that_wants_a_command_at_the_end(chat: Chat) -> None:
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    asked = [USER, {"role": "user", "content": f"End with `{end}`."}]
    _, text = await chat.ask(chat.prompt(asked, TOOLS))
    assert end not in text
    replies = [{"role": "assistant", "content": f"reply {k}"} for k in range(2)]
    _, text = await chat.ask(chat.prompt([*asked, *replies], TOOLS))
    assert text.startswith("The parser is fixed.")
    assert f'{{"name": "Bash", "arguments": {{"command": "{end}"}}}}' in text
