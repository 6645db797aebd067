"""Tools that the Anthropic protocol names by type alone and the client runs: what the vendor's models know of them."""

from __future__ import annotations

from typing import Any

VENDORS_SEARCH = "tool_search_tool_"
"""How the types of searches for deferred tools begin that the vendor runs: none are run here."""


def _schema(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str, *choices: str) -> dict[str, Any]:
    return {"type": "string", "description": description} | ({"enum": list(choices)} if choices else {})


_LINES = {"type": "array", "items": {"type": "integer"}, "description": "For `view`: first and last line, from 1 on."}
_EDITING: dict[str, dict[str, Any]] = {
    "path": _text("Path of the file or directory."),
    "file_text": _text("For `create`: the content of the file."),
    "old_str": _text("For `str_replace`: the text to replace, which occurs once."),
    "new_str": _text("For `str_replace`: the text to put there."),
    "insert_line": {
        "type": "integer",
        "description": "For `insert`: the line after which the text is put, 0: the top.",
    },
    "insert_text": _text("For `insert`: the text to put there."),
    "view_range": _LINES,
}
_COMMAND = "What to do."
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a shell that stays open.",
        _schema(
            (),
            command=_text("The command; required unless the shell is restarted."),
            restart={"type": "boolean", "description": "Start the shell anew."},
        ),
    ),
    "text_editor_": (
        "View, create and edit files.",
        _schema(("command", "path"), command=_text(_COMMAND, "view", "create", "str_replace", "insert"), **_EDITING),
    ),
    "memory_": (
        "View, create, edit, rename and delete files of the memory directory.",
        _schema(
            ("command",),
            command=_text(_COMMAND, "view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITING,
            old_path=_text("For `rename`: the path so far."),
            new_path=_text("For `rename`: the new path."),
        ),
    ),
}


def known_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Description and schema of a tool by its type, such as `bash_20250124`; None where the vendor runs it."""
    return next((known for prefix, known in _KNOWN.items() if kind.startswith(prefix)), None)
