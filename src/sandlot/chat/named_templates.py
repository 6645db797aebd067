"""Checkpoints with a template for conversations with tools and another for those without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandlot.chat.template import ChatTemplate
from sandlot.chat.tokenizer import read_json


class ByTools(ChatTemplate):
    """Takes the template for tools where a conversation has any, as transformers does."""

    def __init__(self, with_tools: ChatTemplate, without: ChatTemplate) -> None:
        self.source = with_tools.source
        self._with_tools, self._without = with_tools, without

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        """The text of a conversation. `TemplateError` when the template does not take it."""
        chosen = self._with_tools if tools else self._without
        return chosen.render(messages, tools, generation_prompt=generation_prompt)


def template_for_tools(model_dir: Path) -> tuple[str, str]:
    """(the `tool_use` template, the `default` one); empty where the checkpoint has not both.

    They are a list in `tokenizer_config.json`, or files of which one is in `additional_chat_templates`.
    """
    default, extra = model_dir / "chat_template.jinja", model_dir / "additional_chat_templates" / "tool_use.jinja"
    if default.is_file():
        named = {"default": default.read_text(encoding="utf-8")}
        if extra.is_file():
            named["tool_use"] = extra.read_text(encoding="utf-8")
    else:
        found = read_json(model_dir / "tokenizer_config.json").get("chat_template")
        listed = found if isinstance(found, list) else []
        named = {t["name"]: t["template"] for t in listed if isinstance(t, dict) and {"name", "template"} <= t.keys()}
    both = named.get("tool_use", ""), named.get("default", "")
    return both if all(both) else ("", "")
