"""Chat formats of all template shapes, loaded once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sandlot.chat.format import TemplateFormat, load_chat_format
from support.chat_templates import SHAPES, write_chat_dir


@pytest.fixture(scope="session")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, TemplateFormat]:
    root = tmp_path_factory.mktemp("formats")
    return {name: load_chat_format(write_chat_dir(root / name, shape)) for name, shape in SHAPES.items()}
