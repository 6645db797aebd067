"""The chat format of a configuration, for sampling and for reading later what was said in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandlot.cache import cache_dir
from sandlot.chat.base import ChatFormat
from sandlot.chat.format import load_chat_format
from sandlot.config import ChatConfig
from sandlot.engine.embedded_model import embedded_model_dir


def format_of(model_dir: Path, chat: ChatConfig) -> ChatFormat:
    """The format of a checkpoint directory as `chat` wants it."""
    return load_chat_format(
        model_dir,
        template=chat.template,
        variables=chat.variables,
        thinking=chat.thinking,
        family=None if chat.family == "template" else chat.family,
        parser=chat.parser,
    )


def recorded_format(config: Mapping[str, Any]) -> ChatFormat | None:
    """The format of a run, from the configuration in its `run.toml`; None where its model is not on this machine."""
    model_dir = Path(config["model"]) if config.get("model") else embedded_model_dir(cache_dir())
    return format_of(model_dir, ChatConfig(**config.get("chat", {}))) if model_dir.is_dir() else None
