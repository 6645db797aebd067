"""Tools that the Responses protocol has types of its own for and the client runs: shells and patches.

The model sees each as a function. A call of it goes out as the item of its type and comes back as one. What such an
item has no place for goes out as a function call, so that the agent's own error comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sandlot.chat.messages import Tool
from sandlot.gateway.wire.canon import block_text, blocks_of, join_text, string

_PATCH = """\
Create, update or delete one file.
For `create_file`, `diff` is the file's content, each line after a `+`.
For `update_file`, `diff` is one or more hunks. A hunk is a line `@@`, followed by a line of the file above the \
change (such as `@@ def run():`) where the change could be in several places; then lines that stay after a space, \
lines that go after a `-`, new lines after a `+`. Three lines that stay stand around a change; line numbers do not."""
_TIMEOUT = {"type": "integer", "description": "Milliseconds after which it is stopped."}


def _text(description: str, *choices: str) -> dict[str, Any]:
    return {"type": "string", "description": description} | ({"enum": list(choices)} if choices else {})


def _texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


def _tool(kind: Literal["local_shell", "shell", "apply_patch"], told: str, required: list[str], **fields: Any) -> Tool:
    return Tool(kind, told, {"type": "object", "properties": fields, "required": required}, kind)


_TOOLS = {
    tool.name: tool
    for tool in (
        _tool(
            "local_shell",
            "Run a command.",
            ["command"],
            command=_texts('The program and its arguments, such as ["bash", "-lc", "ls | wc -l"].'),
            working_directory=_text("Where to run it."),
            timeout_ms=_TIMEOUT,
            env={
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Environment variables to set.",
            },
            user=_text("The user to run it as."),
        ),
        _tool(
            "shell",
            "Run commands in a shell.",
            ["commands"],
            commands=_texts("The command lines, run in this order."),
            timeout_ms=_TIMEOUT,
            max_output_length={"type": "integer", "description": "Characters of output to give back at most."},
        ),
        _tool(
            "apply_patch",
            _PATCH,
            ["type", "path"],
            type=_text("What to do.", "create_file", "update_file", "delete_file"),
            path=_text("The file."),
            diff=_text("The change; not for `delete_file`."),
        ),
    )
}


class _Form(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the item of a call has a place for; what is not set is left out."""


class _LocalShell(_Form):
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class _Shell(_Form):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Create(_Form, tag_field="type", tag="create_file"):
    path: str
    diff: str


class _Update(_Form, tag_field="type", tag="update_file"):
    path: str
    diff: str


class _Delete(_Form, tag_field="type", tag="delete_file"):
    path: str
    diff: Literal[""] = ""


_FORMS: dict[str, Any] = {"local_shell": _LocalShell, "shell": _Shell, "apply_patch": _Create | _Update | _Delete}


def own_tool(entry: Mapping[str, Any]) -> Tool | None:
    """The tool that an entry of a request declares; None for other types, and for a shell that runs at the vendor."""
    tool = _TOOLS.get(string(entry.get("type")))
    environment = entry.get("environment")
    if tool is None or not isinstance(environment, dict):
        return tool
    if environment.get("type") != "local":
        return None
    skills = environment.get("skills")
    lines = [
        f"- {string(skill.get('name'))} ({string(skill.get('path'))}): {string(skill.get('description'))}"
        for skill in (skills if isinstance(skills, list) else ())
        if isinstance(skill, dict)
    ]
    if not lines:
        return tool
    told = join_text((tool.description, "Skills; read what is in the directory of one before you use it:", *lines))
    return Tool(tool.name, told, tool.parameters, tool.kind)


def own_call(kind: str, arguments: Any) -> dict[str, Any] | None:
    """What the item of a call holds besides its ids and status; None where it has no place for the arguments."""
    try:
        given = msgspec.to_builtins(msgspec.convert(arguments, _FORMS[kind]))
    except (KeyError, msgspec.ValidationError):
        return None
    if kind == "apply_patch":
        return {"operation": given}
    if kind == "shell":
        return {"action": {"timeout_ms": None, "max_output_length": None} | given}
    return {"action": {"type": "exec", "env": {}} | given}


def own_arguments(item: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Tool and arguments of a call that comes back; None for other items."""
    kind, call, rest = string(item.get("type")).partition("_call")
    held = item.get("operation" if kind == "apply_patch" else "action")
    if kind not in _TOOLS or not call or rest or not isinstance(held, dict):
        return None
    given = {key: value for key, value in held.items() if value not in (None, {})}
    if kind == "local_shell":
        given.pop("type", None)
    return kind, given


def captured(output: Any, where: str) -> str:
    """What a shell gave, command by command."""
    return join_text(
        _captured(entry) if isinstance(entry, dict) and "outcome" in entry else block_text(entry, f"{where}.{i}")
        for i, entry in enumerate(blocks_of(output, where))
    )


def _captured(entry: Mapping[str, Any]) -> str:
    outcome, ended = entry["outcome"], ""
    if isinstance(outcome, dict):
        ended = "[timed out]" if outcome.get("type") == "timeout" else f"[exit code {outcome.get('exit_code')}]"
    return join_text((*(string(entry.get(name)).removesuffix("\n") for name in ("stdout", "stderr")), ended))
