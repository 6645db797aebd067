"""Every command in the README and the docs is run, page by page, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from support.toy_model import make_toy_model

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KNOWN = {"sh", "text", "python", "toml", "json", "yaml"}
"""`sh` blocks are run and `python` blocks compiled; what needs a GPU, a cloud or a checkpoint is `text`."""


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(page.read_text("utf-8")) if name == language]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("docs") / "toy")


@pytest.mark.slow
@pytest.mark.npm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_commands_of_a_page_work_in_order(page: Path, model: Path, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SANDLOT_MODEL": str(model),  # spares the download of the embedded model; the commands are the reader's own
    }
    for block in blocks(page, "sh"):
        done = subprocess.run(
            ["sh", "-e", "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_say_what_they_are_and_python_compiles(page: Path) -> None:
    text = page.read_text("utf-8")
    assert {name for name, _ in BLOCK.findall(text)} <= KNOWN
    for body in blocks(page, "python"):
        compile(body, str(page), "exec")
    names = re.findall(r"from (sandlot[\w.]*) import ([\w, ]+)", "\n".join(blocks(page, "python")))
    for module, imported in names:
        code = f"from {module} import {imported}"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page}: {target}"


@cache
def help_of(*command: str) -> str:
    argv = [sys.executable, "-m", "sandlot.cli", *command, "--help"]
    return subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}).stdout


def test_documented_flags_exist() -> None:
    """Also in blocks that are not run: every long option of a `sandlot` line is one of that command."""
    seen = 0
    for page in PAGES:
        for body in (*blocks(page, "sh"), *blocks(page, "text")):
            for line in body.splitlines():
                if not (words := line.split("#")[0].split()) or words[0] != "sandlot":
                    continue
                command = words[1:3] if words[1] in ("tasks", "sandbox") else words[1:2]
                text = help_of(*command)
                for flag in (w for w in words if w.startswith("--")):
                    assert flag in text, f"{page}: {line}"
                    seen += 1
    assert seen > 10
