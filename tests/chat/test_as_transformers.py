"""Prompts of every template shape, as `transformers` writes them in the environment that has it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Tool
from support.chat_templates import SHAPES, write_chat_dir
from support.engines import VLLM_PYTHON

CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "read", "arguments": {"path": "é <b>.py", "n": 1}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules & <tags>.\n"},
    {"role": "user", "content": "  Fix\tit: naïve \U0001f600  "},
    {"role": "assistant", "content": "I read.", "tool_calls": [CALL]},
    {"role": "tool", "content": "x = {}\n", "tool_call_id": "abcdefghi", "name": "read"},
    {"role": "assistant", "content": "Done.", "reasoning_content": "quick"},
    {"role": "user", "content": "Thanks."},
]
PLAIN = [CONVERSATION[1], CONVERSATION[4], CONVERSATION[5]]
READ = Tool("read", "Read 'a' <file>.", {"type": "object", "properties": {"path": {"type": "string"}}})
REFERENCE = """
import json, sys
from transformers import PreTrainedTokenizerFast

told = []
for directory, conversations, tools in json.load(sys.stdin):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        told.append([text, tokenizer(text, add_special_tokens=False)["input_ids"]])
print(json.dumps(told))
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="SANDLOT_TEST_VLLM_PYTHON names no interpreter with vLLM")
def test_rendered_as_transformers_does(tmp_path: Path) -> None:
    """Text and ids of conversations without control strings are those of `apply_chat_template`."""
    asked, ours = [], []
    for name, shape in SHAPES.items():
        path = write_chat_dir(tmp_path / name, shape)
        chat = load_chat_format(path)
        whole = PLAIN if name == "plain" else CONVERSATION
        tools = None if name == "plain" else [READ.as_function()]
        conversations = [whole[:end] for end in range(1, len(whole) + 1) if whole[end - 1]["role"] != "system"]
        asked.append((str(path), conversations, tools))
        for messages in conversations:
            text = chat.template.render(messages, tools or [], generation_prompt=True)
            ours.append([text, chat.tokenizer.encode(chat.tokenizer.conceal(text))])
            assert chat.decode(ours[-1][1]) == text
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", REFERENCE], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ours
