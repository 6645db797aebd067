"""vLLM's own parsers, in the environment that has vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import sandlot
from sandlot.chat.format import load_chat_format
from sandlot.errors import ConfigError
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


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_is_said_what_is_missing(tmp_path: Path) -> None:
    path = write_chat_dir(tmp_path / "m", SHAPES["embedded"])
    with pytest.raises(ConfigError, match="needs vllm in Sandlot's own environment: pip install vllm"):
        load_chat_format(path, parser="vllm:hermes+qwen3")
