"""vLLM's own parsers, where vLLM is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Message, Tool
from sandlot.errors import ConfigError
from support.chat_templates import SHAPES, write_chat_dir

TOOLS = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
USER = Message("user", "Fix the bug.")
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


def test_vllm_parsers(tmp_path: Path) -> None:
    path = write_chat_dir(tmp_path / "m", SHAPES["embedded"])
    if find_spec("vllm") is None:
        with pytest.raises(ConfigError, match="needs vllm in Sandlot's own environment: pip install vllm"):
            load_chat_format(path, parser="vllm:hermes+qwen3")
        pytest.skip("vLLM is not installed here; its parsers are tried where it is")
    chat = load_chat_format(path, parser="vllm:hermes+qwen3")
    prompt = chat.render([USER], TOOLS)
    text = f"<think>\nplan\n</think>\n\nI look.\n{CALL}"
    output = chat.encode("") + load_chat_format(path).tokenizer.encode(text)  # type: ignore[attr-defined]
    reply = chat.parse(output, prompt, TOOLS, truncated=False)
    assert [(c.name, c.arguments, c.status) for c in reply.calls] == [("read", {"path": "a.py"}, "ok")]
    assert reply.text.strip() == "I look."
    assert reply.reasoning.strip() == "plan"
