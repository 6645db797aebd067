"""What the wires share on the way in: text of content, arguments of calls, fields of a request.

The canonical form, on every wire:
- Text blocks of one message are joined by one newline and empty ones left out, so a string, a list of one block
  and the same list with cache marks are one message. Text that is only whitespace is no text in an assistant message.
- What is no text (an image, an unknown block) becomes a note in its place; nothing unknown is refused.
- Arguments that are a JSON object are a dict, however they were written; `""` and null mean `{}`; anything else
  (`null` as text, `[1]`, broken JSON) stays the raw text.
- A message that carries nothing else is kept with empty text, whether its content was `""`, null, absent or `[]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sandlot.chat.messages import Tool, canonical_json
from sandlot.gateway.wire.base import WireError
from sandlot.gateway.wire.values import check_together


def invalid(where: str, problem: str) -> WireError:
    """The error for a field that cannot be understood: `where` names it, `problem` says what is wrong and the cure."""
    return WireError("invalid_request", f"{where}: {problem}")


def note(kind: str) -> str:
    """The text that stands for a block which cannot be rendered."""
    return f"[{kind} left out: this model reads text only]"


def join_text(parts: Iterable[str]) -> str:
    """Text of several blocks of one message."""
    return "\n".join(p for p in parts if p)


def blocks_of(content: Any, where: str) -> Sequence[Any]:
    """Content as a list of blocks: a string is one text block, null is none."""
    if content is None:
        return ()
    if isinstance(content, str | dict):
        return (content,)
    if isinstance(content, list):
        return content
    raise invalid(where, "content must be a string or a list of blocks")


def block_text(block: Any, where: str) -> str:
    """Text of one block that is no call and no result."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        raise invalid(where, "a content block must be an object with a type")
    kind = kind_of(block)
    if isinstance(text := block.get("text"), str):
        return text
    if kind == "text":
        return ""
    if isinstance(refusal := block.get("refusal"), str):
        return refusal
    source = block.get("source")
    if kind == "search_result":
        text = text_of(block.get("content"), f"{where}.content")
        return join_text((string(block.get("title")), string(source), text))
    if kind == "document" and isinstance(source, dict):
        text = string(source.get("data")) if source.get("type") == "text" else note(kind)
        if source.get("type") == "content":
            text = text_of(source.get("content"), f"{where}.source.content")
        return join_text((string(block.get("title")), string(block.get("context")), text))
    return note(kind)


def text_of(content: Any, where: str) -> str:
    """Text of a string, a list of blocks or null."""
    if isinstance(content, str):
        return content
    return join_text(block_text(b, f"{where}.{i}") for i, b in enumerate(blocks_of(content, where)))


def kind_of(block: Mapping[str, Any]) -> str:
    """The type of a block, or a word for a block that does not say."""
    return string(block.get("type")) or "block"


def visible(text: str) -> str:
    """An assistant's text; whitespace alone is none, because most clients drop it when they replay."""
    return text if text.strip() else ""


def string(value: Any) -> str:
    """A string field that may be absent or of another type."""
    return value if isinstance(value, str) else ""


def arguments_of(value: Any) -> dict[str, Any] | str:
    """Arguments of a call in canonical form, from an object or from its JSON text."""
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if not isinstance(value, str):
        return canonical_json(value)
    if not value.strip():
        return {}
    check_together(value)
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


UNPARSED = "__unparsedToolInput"
"""The key of the wrapper around arguments that are no object, where a protocol has objects only."""


def unwrapped(value: Any) -> dict[str, Any] | str:
    """Arguments of a call; the marked wrapper around arguments that are no object gives the raw text back."""
    if isinstance(value, dict) and value.keys() == {UNPARSED}:
        wrapped = value[UNPARSED]
        if isinstance(wrapped, dict) and isinstance(raw := wrapped.get("raw"), str):
            return raw
    return arguments_of(value)


def object_of(body: Any) -> dict[str, Any]:
    """The request body, which must be an object."""
    if not isinstance(body, dict):
        raise invalid("body", "it must be a JSON object")
    return body


def messages_of(body: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The messages of a request."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "it must be a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid(f"messages.{i}", "a message must be an object with role and content")
    return messages


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is set, as a positive number of tokens."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid(name, "it must be a positive whole number of tokens")
        return value
    return None


def new_tools(found: Sequence[Tool], offered: Sequence[Tool]) -> tuple[Tool, ...]:
    """Those of the tools that searches found which are not offered anyway, each once."""
    known = {tool.name for tool in offered}
    return tuple({tool.name: tool for tool in reversed(found) if tool.name not in known}.values())[::-1]


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the official SDKs say that they send this request again."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and count.strip("0") != ""


def branch_of(headers: Mapping[str, str], tools: Sequence[Tool]) -> str:
    """Whose conversation this is, as far as the client says: a label for people, never what continuity rests on."""
    if agent := headers.get("x-claude-code-agent-id"):
        return f"subagent:{agent}"
    if parent := headers.get("x-parent-session-id"):
        return f"subagent:{headers.get('x-session-id') or parent}"
    if kind := headers.get("x-openai-subagent"):
        return f"subagent:{headers.get('thread-id') or headers.get('x-codex-parent-thread-id') or kind}"
    if '"request_kind":"compaction"' in headers.get("x-codex-turn-metadata", "").replace(" ", ""):
        return "side"
    return "main" if tools else "side"
