"""Typing the text of an XML-form argument by the tool's JSON schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sandlot.chat.json_calls import parse_json
from sandlot.chat.messages import Tool


def properties(tool: Tool | None) -> Mapping[str, Any] | None:
    """The declared parameters of a tool; None where it declares none."""
    declared = tool.parameters.get("properties") if tool else None
    return declared if isinstance(declared, dict) and declared else None


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """`text` as the type its schema allows.

    Where a string is allowed, and where nothing is declared, text stays text (but `null` is null where null is
    allowed). Text that does not fit the declared type stays text too, so that the tool's own error comes back.
    """
    allowed = kinds(schema, root)
    word = text.strip()
    if "null" in allowed and word == "null":
        return None
    if not allowed or "string" in allowed:
        return text
    if "boolean" in allowed and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if allowed & {"integer", "number"}:
        number = _number(word)
        if number is not None and (isinstance(number, int) or "number" in allowed or number.is_integer()):
            return int(number) if "number" not in allowed else number
    if allowed & {"object", "array"}:
        value = from_json(word)
        if isinstance(value, dict if allowed.isdisjoint({"array"}) else (dict, list) if "object" in allowed else list):
            return value
    return text


def from_json(text: str) -> Any:
    """The value that a text is in JSON; the text itself where it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _number(word: str) -> int | float | None:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in word else None


def kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types a schema allows; empty where it does not say."""
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    if isinstance(ref := schema.get("$ref"), str):
        return kinds(_resolve(ref, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(k for k in declared if isinstance(k, str))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list):
            each = [kinds(option, root, depth + 1) for option in options]
            return frozenset().union(*each) if all(each) else frozenset()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_kind_of(v) for v in values)


def inner(schema: Any, name: str | None, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The schema of a member of an object, or of the items of an array where there is no name; None without one."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    if isinstance(ref := schema.get("$ref"), str):
        return inner(_resolve(ref, root), name, root, depth + 1)
    if name is None:
        found = schema.get("items")
    else:
        named = schema.get("properties")
        found = named.get(name) if isinstance(named, dict) else None
        found = schema.get("additionalProperties") if found is None else found
    options = (option for key in ("anyOf", "oneOf", "allOf") for option in schema.get(key) or ())
    others = (inner(option, name, root, depth + 1) for option in options)
    return found if isinstance(found, dict) else next((other for other in others if other is not None), None)


def _kind_of(value: Any) -> str:
    for kind, types in (("boolean", bool), ("integer", int), ("number", float), ("string", str), ("array", list)):
        if isinstance(value, types):
            return kind
    return "null" if value is None else "object"


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node
