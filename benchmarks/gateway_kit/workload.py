"""The agent session that every gateway is measured with: the same texts for the same Python version.

A head of about 12k tokens (system prompt and 20 tools), a task, then turn by turn a sampled reply of about 200 tokens
with one tool call and a tool result of about 600. Its text is source code of the standard library.
"""

from __future__ import annotations

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

STOP = "<|im_end|>"
_MODULES = ("argparse", "ast", "dataclasses", "enum", "inspect", "logging/__init__", "subprocess", "tarfile", "typing")
_TOOLS = (
    *("Bash", "Read", "Write", "Edit", "MultiEdit", "Glob", "Grep", "List", "Task", "Todo"),
    *("Fetch", "Search", "NotebookRead", "NotebookEdit", "Output", "Kill", "Plan", "Command", "Skill", "Ask"),
)
_VARIANTS = 64


@dataclass(frozen=True)
class Reply:
    """What the engine samples in one turn, in the embedded model's own form."""

    text: str
    ids: list[int]


class Workload:
    """All texts of the benchmark. `replies` and `results` are taken in turn, each of `_VARIANTS` of them again."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        library = Path(sysconfig.get_paths()["stdlib"])
        self._source = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)
        self._random = random.Random(8400)
        self.tools = [self._tool(name) for name in _TOOLS]
        shown = len(self.ids("\n".join(json.dumps(tool) for tool in self.tools)))
        self.system = self._text(max(500, 12_000 - shown))
        self.task = self._text(300)
        self.results = [self._text(590) for _ in range(_VARIANTS)]
        self.replies = [self._reply(_TOOLS[k % len(_TOOLS)]) for k in range(_VARIANTS)]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, markers in it as control tokens."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _text(self, tokens: int) -> str:
        """About so many tokens of source text, from a random line on, without anything that looks like a marker."""
        start = self._source.index("\n", self._random.randrange(len(self._source) - 12 * tokens - 1000)) + 1
        piece = self.tokenizer.encode(self._source[start : start + 8 * tokens + 400], add_special_tokens=False)
        end = piece.offsets[min(tokens, len(piece.ids)) - 1][1]
        return self._source[start : start + end].strip().replace("<", "(").replace(">", ")")

    def _tool(self, name: str) -> dict[str, Any]:
        kinds = ("string", "integer", "boolean")
        fields = {
            field: {"type": self._random.choice(kinds), "description": self._text(25)}
            for field in ("command", "description", "timeout", "path", "pattern")
        }
        schema = {"type": "object", "properties": fields, "required": ["command"], "additionalProperties": False}
        return {"name": name, "description": self._text(200), "input_schema": schema}

    def _reply(self, tool: str) -> Reply:
        arguments = {"command": self._text(85), "description": self._text(8)}
        call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
        text = f"{self._text(60)}\n<tool_call>\n{call}\n</tool_call>{STOP}"
        return Reply(text, self.ids(text))
