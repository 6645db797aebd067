"""What both OpenAI protocols share: errors, and freeform tools, which the model sees as functions of one string."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandlot.chat.messages import ParsedCall, Tool
from sandlot.gateway.wire.base import ErrorKind, WireError
from sandlot.gateway.wire.canon import string
from sandlot.gateway.wire.framing import arguments_text

ERRORS: dict[ErrorKind, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "context_overflow": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "budget": (403, "insufficient_quota", "insufficient_quota"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "overloaded": (503, "server_error", "overloaded"),
}


def error_object(error: WireError) -> dict[str, Any]:
    """The body of an error."""
    _, kind, code = ERRORS[error.kind]
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def freeform_tool(declared: Mapping[str, Any], name: str) -> Tool:
    """A freeform tool as the model sees it; the grammar its text must follow is told, since nothing enforces it."""
    text: dict[str, Any] = {"type": "string"}
    wanted = declared.get("format")
    if isinstance(wanted, dict) and isinstance(inner := wanted.get("grammar"), dict):
        wanted = {**wanted, **inner}  # the chat protocol nests what the other one has flat
    if isinstance(wanted, dict) and (definition := string(wanted.get("definition"))):
        text["description"] = f"Raw text that follows this {string(wanted.get('syntax'))} grammar:\n{definition}"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return Tool(name, string(declared.get("description")), schema, "custom")


def freeform_text(call: ParsedCall) -> str:
    """The raw text of a call of a freeform tool; arguments of another shape go out as their JSON text."""
    arguments = call.arguments
    if isinstance(arguments, dict) and arguments.keys() == {"input"} and isinstance(text := arguments["input"], str):
        return text
    return arguments_text(call)
