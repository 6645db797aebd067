"""A checkpoint's Jinja chat template, rendered as transformers does, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sandlot.chat.tokenizer import read_json
from sandlot.errors import ModelError

EMBEDDED_TEMPLATE = Path(__file__).parent / "templates" / "embedded.jinja"
"""The chat template of the embedded model."""


class TemplateError(ModelError):
    """The chat template refused a conversation, or failed on it."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks made from text; it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The usual environment of chat templates; the fields of a conversation are found without first failing."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset(("first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"))


class ChatTemplate:
    """One compiled template with the values it is given besides the conversation. Thread-safe.

    The template comes with the model and is trusted; what it is given is not, and never becomes template source.
    `now` is what `strftime_now` reads: one fixed moment, so that equal conversations render equally.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime) -> None:
        self.source = source
        env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = now.strftime
        self._variables = dict(variables)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as e:
            raise ModelError(f"the chat template does not compile ({e}); correct its chat_template.jinja") from e

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        """The text of a conversation. `TemplateError` when the template does not take it."""
        try:
            return self._template.render(
                **self._variables,
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        except RecursionError as e:
            raise TemplateError("a tool or tool call in the conversation is nested too deeply to render") from e
        except Exception as e:  # a template can fail with any error of the expressions in it
            raise TemplateError(f"the model's chat template does not take this conversation: {e}") from e


def load_template(
    model_dir: Path,
    *,
    override: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> ChatTemplate:
    """The template of a checkpoint, or `override`: a path, or template source.

    Looked for as transformers does: `chat_template.jinja`, then `chat_template` in `tokenizer_config.json` (a string,
    or a list of named templates, of which `tool_use` and then `default` is taken), then `chat_template.json`.
    """
    config = read_json(model_dir / "tokenizer_config.json")
    source = _source(model_dir, config) if override is None else _override(override)
    if not source:
        raise ModelError(
            f"{model_dir} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), "
            f"so messages cannot become a prompt; take the instruct model, or write a template into that file"
        )
    given = {**special_tokens(model_dir), **(variables or {})}
    return ChatTemplate(source, given, now or datetime.now().astimezone())


def special_tokens(model_dir: Path) -> dict[str, Any]:
    """The special-token variables a template may use, such as `bos_token`."""
    config = {
        **read_json(model_dir / "special_tokens_map.json"),
        **read_json(model_dir / "tokenizer_config.json"),
    }
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_token"):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            found[key] = value
    extra = config.get("additional_special_tokens")
    if isinstance(extra, list) and extra:
        found["additional_special_tokens"] = [t.get("content", "") if isinstance(t, dict) else t for t in extra]
    return found


def _override(override: str | Path) -> str:
    if isinstance(override, Path) or (override and "{" not in override):
        try:
            return Path(override).read_text(encoding="utf-8")
        except OSError as e:
            raise ModelError(f"the chat template {override} cannot be read ({e.strerror}); check the path") from e
    return override


def _source(model_dir: Path, config: Mapping[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template") or read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else ""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which models never saw in training.
    pair = (separators[0], separators[1]) if separators else None  # a template may write them as a list
    return _json(ensure_ascii, indent, pair, sort_keys).encode(value)


@lru_cache(maxsize=16)
def _json(
    ensure_ascii: bool, indent: int | str | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    """What `json.dumps` makes anew for each value."""
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
