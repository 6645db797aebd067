"""The scripted policy itself: which turn is due in a prompt, and the token ids it is written with. No I/O."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from sandlot.engine.scripted.script import Call, Script, Scripts, Step

_OFFERED = re.compile(r'"name":\s*"([^"]+)"')
_ALIASES = {"bash": ("run_shell_command", "exec_command", "shell")}
"""What agents also call a tool. A script calls it by the key, which an agent that has it is asked for first."""
_ARGUMENTS = {"exec_command": {"command": "cmd"}}
"""Arguments that a tool takes under another name."""
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How an agent ends that wants a command instead of a last word, where its prompt says so."""
_SPLIT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Markup:
    """What the policy knows of its model's chat format. `header_ids` open an assistant turn."""

    header_ids: tuple[int, ...]
    stop_id: int


class ScriptedPolicy:
    """Chooses and encodes turns. The same prompt always gets the same ids."""

    def __init__(self, tokenizer: Tokenizer, scripts: Scripts, markup: Markup) -> None:
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._markup = markup
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    def reply(self, prompt: Sequence[int]) -> list[int]:
        """The ids of the turn that is due after `prompt`, the stop token included."""
        segments = [self._decode(part) for part in split_at(prompt, self._markup.header_ids)]
        opened = "<think>" in segments[-1] and "</think>" not in segments[-1]
        script, step = self._due(segments)
        if not step.calls and _SUBMIT in segments[0]:
            step = Step(step.reasoning, step.text, [Call("bash", {"command": _SUBMIT})])
        rng = random.Random(hashlib.sha256(f"{script.match if script else ''}\0{step!r}".encode()).digest())
        text = write_step(step, offered_tools(segments[0]), thinking_open=opened)
        ids = self._encode(text if text is not None else write_step(self._scripts.fallback, {}, opened) or "")
        if rng.random() < 0.5:
            ids = self._split_some(ids, rng)
        return [*ids, self._markup.stop_id]

    def _due(self, segments: Sequence[str]) -> tuple[Script | None, Step]:
        """The script of the task and its next step, told by the assistant turns since the task was first named."""
        script = self._scripts.find("\0".join(segments))
        if script is None:
            return None, self._scripts.fallback
        first = next((k for k, text in enumerate(segments) if script.match in text), 0)
        # Each segment after the first one opens an assistant turn; the last of them is the turn to be written.
        done = len(segments) - first - 2
        return script, script.steps[done] if 0 <= done < len(script.steps) else self._scripts.fallback

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _split_some(self, ids: Sequence[int], rng: random.Random) -> list[int]:
        """The same text in a tokenization that the tokenizer itself would not choose."""
        result: list[int] = []
        for i in ids:
            token = self._tokenizer.id_to_token(i) or ""
            if i not in self._added and len(token) > 1 and rng.random() < _SPLIT_SHARE:
                at = rng.randrange(1, len(token))
                left, right = (self._tokenizer.token_to_id(part) for part in (token[:at], token[at:]))
                if left is not None and right is not None:
                    result += [left, right]
                    continue
            result.append(i)
        return result


def split_at(ids: Sequence[int], header: Sequence[int]) -> list[Sequence[int]]:
    """`ids` cut before the end of every occurrence of `header`, the headers left out."""
    parts: list[Sequence[int]] = []
    start = k = 0
    n = len(header)
    while k + n <= len(ids):
        if ids[k] == header[0] and list(ids[k : k + n]) == list(header):
            parts.append(ids[start:k])
            start = k = k + n
        else:
            k += 1
    parts.append(ids[start:])
    return parts


def offered_tools(text: str) -> dict[str, str]:
    """The names of the tools a prompt offers, by their lower-case form."""
    return {name.lower(): name for name in _OFFERED.findall(text)}


def write_step(step: Step, offered: dict[str, str], thinking_open: bool) -> str | None:
    """The text of a turn in the Hermes form of tool calls, or None if it calls a tool that is not offered."""
    tools = [_tool(call.tool.lower(), offered) for call in step.calls]
    if None in tools:
        return None
    text = "" if not step.reasoning and not thinking_open else f"{step.reasoning}\n</think>\n\n"
    if text and not thinking_open:
        text = "<think>\n" + text
    parts = [step.text] if step.text else []
    for tool, call in zip(tools, step.calls, strict=True):
        renamed = _ARGUMENTS.get(tool or "", {})
        body = json.dumps({renamed.get(k, k): v for k, v in call.arguments.items()}, ensure_ascii=False)
        name = json.dumps(offered[tool or ""], ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {body}}}\n</tool_call>')
    return text + "\n".join(parts)


def _tool(wanted: str, offered: Mapping[str, str]) -> str | None:
    """The lower-case name under which the wanted tool is offered."""
    return next((name for name in (wanted, *_ALIASES.get(wanted, ())) if name in offered), None)


def logprob(before: int, token: int, temperature: float = 1.0) -> float:
    """The policy's log-probability of `token` after `before`: negative, finite, the same everywhere.

    The pair is hashed to a probability p; at other temperatures it is p against the rest, sharpened or flattened.
    """
    digest = hashlib.blake2b(f"{before} {token}".encode(), digest_size=8).digest()
    p = 0.05 + 0.94 * int.from_bytes(digest, "little") / 2**64
    if temperature == 1.0 or temperature == 0:
        return math.log(p)
    ours, rest = math.log(p) / temperature, math.log1p(-p) / temperature
    top = max(ours, rest)
    return ours - top - math.log(math.exp(ours - top) + math.exp(rest - top))
