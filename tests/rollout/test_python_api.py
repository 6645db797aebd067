"""`import sandlot`: what it gives, and the page that shows it, run as it stands."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sandlot
from sandlot.errors import ConfigError
from support.toy_model import make_toy_model

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text("utf-8")


def test_every_name_is_there_and_on_the_page() -> None:
    for name in sandlot.__all__:
        assert callable(getattr(sandlot, name)), name
        assert f"`{name}" in PAGE, name
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        sandlot.nobody  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("first", ["", "import sandlot.rollout.run"])
def test_the_package_is_called_like_its_function_whatever_was_imported_before(first: str, tmp_path: Path) -> None:
    code = f"{first}\nimport sandlot, asyncio\nfrom sandlot.rollout.episode import EpisodeRunner\n" + (
        "config = sandlot.load_config(flags={'only': ['nobody']})\nasyncio.run(sandlot.rollout(config, 'run'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "sandlot.errors.ConfigError: there is no task called 'nobody' in bundled" in done.stderr


def test_a_call_is_a_coroutine_that_says_what_it_takes(tmp_path: Path) -> None:
    assert list(inspect.signature(sandlot.rollout).parameters)[:2] == ["config", "out"]
    with pytest.raises(ConfigError, match="no task called 'nobody'"):
        asyncio.run(sandlot.rollout(sandlot.load_config(flags={"only": ["nobody"]}), tmp_path / "run", say=print))


@pytest.mark.slow
@pytest.mark.npm
def test_the_program_on_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    env = {**os.environ, "SANDLOT_MODEL": str(make_toy_model(tmp_path / "toy"))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    solved, *samples = done.stdout.splitlines()
    assert solved == "page-count--pi--0 1.0 None"
    assert samples
    assert all(re.fullmatch(r"page-count--pi--0 \d+ tokens, [1-9]\d* of them trained", line) for line in samples)
