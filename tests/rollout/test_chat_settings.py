"""The settings of a run's chat format, from its file and from what was recorded of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.chat.messages import Message
from sandlot.config import load_config
from sandlot.errors import ModelError
from sandlot.rollout.format import format_of, recorded_format
from support.chat_templates import SHAPES, write_chat_dir

QUESTION = [Message("user", "Fix the bug.")]


def test_variables_reach_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = write_chat_dir(tmp_path / "m", SHAPES["stripping"]), tmp_path / "run.toml"
    file.write_text(f'model = "{model}"\n[chat]\nvariables = {{ enable_thinking = false }}\n')
    config = load_config(file)
    chat = format_of(model, config.chat)
    shown = chat.decode(chat.render(QUESTION, ()))
    assert shown.endswith("assistant\n<think>\n\n</think>\n\n")
    again = recorded_format(config.model_dump(mode="json", exclude_none=True))
    assert again is not None
    assert again.decode(again.render(QUESTION, ())) == shown
    monkeypatch.setenv("SANDLOT_CHAT__VARIABLES", '{"enable_thinking": true}')
    chat = format_of(model, load_config().chat)
    assert chat.decode(chat.render(QUESTION, ())).endswith("assistant\n")


def test_what_the_conversation_gives_is_no_variable(tmp_path: Path) -> None:
    model = write_chat_dir(tmp_path / "m", SHAPES["embedded"])
    file = tmp_path / "run.toml"
    file.write_text('[chat]\nfamily = "template"\nvariables = { messages = [] }\n')
    with pytest.raises(ModelError, match="multiple values for keyword argument 'messages'"):
        format_of(model, load_config(file).chat)
