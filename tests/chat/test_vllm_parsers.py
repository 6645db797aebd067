"""vLLM's own parsers, in the environment that has vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import sandlot
from sandlot.chat.format import load_chat_format
from sandlot.errors import ConfigError
from support.call_forms import TOOLS, WRITERS, Calls, reveal, tool
from support.chat_templates import SHAPES, write_chat_dir
from support.engines import VLLM_PYTHON

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
READ = """
import json, sys
from dataclasses import asdict
from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Message, Tool
from sandlot.errors import ConfigError

directory, *texts = sys.argv[1:]
tools = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
plain, chat = load_chat_format(directory), load_chat_format(directory, parser="vllm:hermes+qwen3")
prompt = chat.render([Message("user", "Fix the bug.")], tools)
told = [asdict(chat.parse(plain.tokenizer.encode(text), prompt, tools, truncated=False)) for text in texts]
print("--", file=sys.stderr)
for parser in ("pythonic", "openai"):
    failing = load_chat_format(directory, parser=f"vllm:{parser}")
told.append(asdict(failing.parse(plain.encode(texts[0]), prompt, tools, truncated=False)))
try:
    load_chat_format(directory, parser="vllm:nobody")
except ConfigError as error:
    told.append(str(error))
print(json.dumps(told))
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="SANDLOT_TEST_VLLM_PYTHON names no interpreter with vLLM")
def test_answers_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    path = write_chat_dir(tmp_path / "m", SHAPES["embedded"])
    texts = [f"<think>\nplan\n</think>\n\nI look.\n{CALL}", CALL.replace("read", "raed"), "Just <tool_call> text."]
    env = {**os.environ, "PYTHONPATH": str(Path(sandlot.__file__).parents[1])}
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", READ, str(path), *texts], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    fitting, _, other = done.stderr.partition("--\n")
    assert "writes for a tool call" not in fitting
    assert other.count("writes for a tool call") == 2
    assert "cannot read an answer (GptOssToolParser is a stub" in other
    called, unknown, text, unread, refused = json.loads(done.stdout.splitlines()[-1])
    (call,) = called["calls"]
    assert (call["name"], call["arguments"], call["status"]) == ("read", {"path": "a.py"}, "ok")
    assert (called["text"].strip(), called["reasoning"].strip()) == ("I look.", "plan")
    assert [c["status"] for c in unknown["calls"]] == ["unknown_tool"]
    assert text["calls"] == []
    assert "no parser called 'nobody'" in refused
    assert (unread["text"], [c["status"] for c in unread["calls"]]) == (texts[0], ["missing_name"])


NAMES = {
    "glm-4.5": "glm45", "glm-4.7": "glm47", "minimax": "minimax_m2", "minimax-m3": "minimax_m3", "kimi": "kimi_k2",
    "xtml": "kimi_k3", "deepseek v3": "deepseek_v3", "deepseek v3.1": "deepseek_v31", "deepseek v3.2": "deepseek_v32",
    "deepseek v4": "deepseek_v4", "mistral": "mistral", "mistral named": "mistral", "json list, open": "granite",
    "apertus": "apertus", "python": "lfm2", "python lines": "olmo3", "gemma": "gemma4", "llama": "llama3_json",
}  # fmt: skip
"""The parser that vLLM has for each form."""
DEEP: Calls = [("Note", {"items": [{"text": "5", "done": True}, {"text": "a\n", "done": False}], "text": 'é "x" 1'})]
NOTE = tool(
    "Note",
    items={
        "type": "array",
        "items": {"type": "object", "properties": {"text": {"type": "string"}, "done": {"type": "boolean"}}},
    },
    text={"type": "string"},
)
MARKERS = re.compile(
    r"<\|[a-z_]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<｜[^<>\n]{1,30}｜>|｜DSML｜|\[TOOL_CALLS\]|\[ARGS\]"
    r"|\]<\]minimax\[>\[|</?(?:minimax:tool_call|arg_key|arg_value|tool_calls)>"
)
COMPARE = """
import json, sys
from dataclasses import asdict
from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Tool

given = json.load(sys.stdin)
tools = tuple(Tool(name, "", parameters) for name, parameters in given["tools"])
told = []
for directory, form, parser, texts in given["cases"]:
    ours, theirs = load_chat_format(directory, parser=form), load_chat_format(directory, parser=f"vllm:{parser}")
    for text in texts:
        ids = ours.tokenizer.encode(ours.tokenizer.conceal(text))
        replies = (asdict(chat.parse(ids, (), tools, truncated=False)) for chat in (ours, theirs))
        calls = lambda reply: [[c["name"], c["arguments"], c["status"]] for c in reply["calls"]]
        told.append([[reply["text"].strip(), calls(reply)] for reply in replies])
print(json.dumps(told))
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="SANDLOT_TEST_VLLM_PYTHON names no interpreter with vLLM")
def test_our_parsers_read_what_vllm_reads(tmp_path: Path) -> None:
    """Each form as its model writes it: one call, several, none with arguments, lists of objects, text before them."""
    several: Calls = [("Bash", {"command": "ls -l", "timeout": 5}), ("Write", {"path": "é.py", "content": "x\n\ny"})]
    conversations: list[Calls] = [several[:1], several, [("LS", {})], DEEP, [*DEEP, ("LS", {})]]
    cases = []
    for name, parser in NAMES.items():
        writer = WRITERS[name]
        texts = [reveal(writer.write(calls)) for calls in conversations]
        if writer.text_before and name != "python lines":  # there vLLM drops the text
            texts.append(f"I look.\n{texts[1]}")
        tokens = sorted({*MARKERS.findall("".join(texts)), "<|python_tag|>"})
        shape = replace(SHAPES["embedded"], tokens=("<|im_start|>", "<|im_end|>", *tokens))
        directory = write_chat_dir(tmp_path / name, shape)
        cases.append((str(directory), writer.form, parser, texts))
    given = {"tools": [[t.name, t.parameters] for t in (*TOOLS, NOTE)], "cases": cases}
    env = {**os.environ, "PYTHONPATH": str(Path(sandlot.__file__).parents[1])}
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", COMPARE], input=json.dumps(given), capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    told = iter(json.loads(done.stdout.splitlines()[-1]))
    for _, form, parser, texts in cases:
        for text in texts:
            ours, theirs = next(told)
            assert ours == theirs, (form, parser, text)
            assert all(status == "ok" for _, _, status in ours[1]), (form, parser, text)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_is_said_what_is_missing(tmp_path: Path) -> None:
    path = write_chat_dir(tmp_path / "m", SHAPES["embedded"])
    with pytest.raises(ConfigError, match="needs vllm in Sandlot's own environment: pip install vllm"):
        load_chat_format(path, parser="vllm:hermes+qwen3")
