"""Replies read by the parsers of an installed vLLM: for models that neither our own forms nor a family covers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from sandlot.chat.base import ChatFormat
from sandlot.chat.json_calls import parse_object
from sandlot.chat.messages import Message, ParsedCall, Reply, Tool
from sandlot.chat.replies import unreadable
from sandlot.errors import ConfigError

log = logging.getLogger("sandlot.chat")


class VllmParsed:
    """A `ChatFormat` that renders as another one and parses as vLLM does.

    vLLM's parsers tell a call or nothing: what they cannot read stays text, and a call that was cut is no call. They
    hold state, so one reply is read at a time.
    """

    def __init__(self, rendering: ChatFormat, model_dir: Path, parsers: str) -> None:
        """`parsers` is the name of a tool parser, or `TOOLS+REASONING` with one for thoughts, or `+REASONING`."""
        self._rendering = rendering
        tools, _, reasoning = parsers.partition("+")
        self._tool_parser = (
            _named("vllm.tool_parsers", "ToolParserManager", "get_tool_parser", tools) if tools else None
        )
        self._reasoning_parser = (
            _named("vllm.reasoning", "ReasoningParserManager", "get_reasoning_parser", reasoning) if reasoning else None
        )
        self._tokenizer = _load_tokenizer(model_dir)
        self._lock = Lock()
        self.name = rendering.name
        self.vocab_size = rendering.vocab_size
        self.stop_token_ids = rendering.stop_token_ids
        self.can_extend = rendering.can_extend

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[int]:
        """Ids of the whole prompt, ending with the generation prompt."""
        return self._rendering.render(messages, tools)

    def extend(
        self, last_output: Sequence[int], call_names: Sequence[str], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Ids that follow a sampled turn."""
        return self._rendering.extend(last_output, call_names, new, tools)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings in it stay text."""
        return self._rendering.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._rendering.decode(ids)

    def parse(
        self, output_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool], *, truncated: bool
    ) -> Reply:
        """Take a sampled answer apart."""
        end = len(output_ids)
        while end and output_ids[end - 1] in self.stop_token_ids:
            end -= 1
        text = self.decode(output_ids[:end])
        try:
            with self._lock:
                return self._parse(text, tools, truncated)
        except Exception as e:  # these parsers fail on what they do not expect
            log.warning("%s: vLLM's parser cannot read an answer (%s)", self.name, e)
            return unreadable(text, truncated=truncated)

    def _parse(self, text: str, tools: Sequence[Tool], truncated: bool) -> Reply:
        request = _request(tools)
        thought, rest = "", text
        if self._reasoning_parser is not None:
            found, left = self._reasoning_parser(self._tokenizer).extract_reasoning(text, request)
            thought, rest = (found or "").strip("\n"), (left or "").lstrip("\n")
        if self._tool_parser is None:
            return Reply(rest, thought, (), truncated)
        read = self._tool_parser(self._tokenizer, request.tools).extract_tool_calls(rest, request)
        names = {t.name for t in tools}
        calls = tuple(_call(c.function.name, c.function.arguments, names) for c in read.tool_calls or ())
        visible = (read.content or "").rstrip("\n") if read.tools_called else rest
        return Reply(visible if visible.strip() else "", thought, calls, truncated)


def _call(name: str, arguments: str, names: set[str]) -> ParsedCall:
    value = parse_object(arguments)
    if value is None:
        return ParsedCall(name, arguments, arguments, "invalid_arguments")
    return ParsedCall(name, value, arguments, "ok" if name in names else "unknown_tool")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        missing = name.partition(".")[0]
        raise ConfigError(f"a vllm: parser needs {missing} in Sandlot's own environment: pip install vllm") from e


def _named(module: str, manager: str, getter: str, name: str) -> Any:
    try:
        return getattr(getattr(_module(module), manager), getter)(name)
    except KeyError as e:
        raise ConfigError(f"the installed vLLM has no parser called {name!r} in {module}") from e


def _load_tokenizer(model_dir: Path) -> Any:
    return _module("transformers").AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)


def _request(tools: Sequence[Tool]) -> Any:
    try:
        protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    except ImportError:  # where it was before
        protocol = _module("vllm.entrypoints.openai.protocol")
    body: dict[str, Any] = {"messages": [], "model": "", "skip_special_tokens": False}
    if tools:
        body |= {"tools": [t.as_function() for t in tools], "tool_choice": "auto"}
    return protocol.ChatCompletionRequest.model_validate(body)
