"""Shared read-only layers made of hashed wheels: for agents that are Python, beside whatever Python a task uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandlot.errors import ConfigError
from sandlot.harness.layer import Progress, installers, make_layer
from sandlot.sandbox import Layer

_RECIPE = 1
"""Raise it when the way of installing changes, so that layers are made anew."""
_TIMEOUT = 1800.0


def wheel_layer(
    name: str,
    requirements: str,
    *,
    version: str,
    python: str,
    files: Mapping[str, str],
    drop: Sequence[str] = (),
    progress: Progress | None = None,
) -> Layer:
    """The layer `/opt/sandlot/<name>`: the wheels in `lib`, for Python `python` (such as `3.11`), and `files`.

    `requirements` are hashed pins, complete; `drop` names paths below `lib` that no run needs. Blocking.
    """

    def fill(content: Path) -> None:
        if progress:
            progress(f"fetching {name} {version} for Python {python}")
        _install(content / "lib", requirements, python, f"{name} {version}")
        for unused in drop:
            shutil.rmtree(content / "lib" / unused)
        _compile(content / "lib", python)
        for path, text in files.items():
            (content / path).write_text(text)
        for file in (p for p in content.rglob("*") if p.is_file()):
            file.chmod(0o755 if file.stat().st_mode & 0o111 else 0o644)

    return make_layer(
        name,
        version=version,
        recipe=[_RECIPE, requirements, python, dict(files), list(drop)],
        entry=next(iter(files)),
        packages={name: {"version": version, "python": python}},
        fill=fill,
    )


def _install(target: Path, requirements: str, python: str, what: str) -> None:
    wanted = target.parent.parent / "requirements.txt"
    wanted.write_text(requirements)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--python-version", python]
    said = "neither pip nor uv is here"
    for pip in reversed(installers()):  # uv fetches all at once, where it can
        argv = [*pip, "install", *options, "--target", str(target), "-r", str(wanted)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            said = f"it took more than {_TIMEOUT:.0f} s"
            continue
        if done.returncode == 0:
            break
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        shutil.rmtree(target, ignore_errors=True)
    else:
        raise ConfigError(
            f"pip could not fetch {what} for Python {python} ({said.strip()}): "
            "check the network and pip's index setting (pip config list), then try again"
        )
    shutil.rmtree(target / "bin", ignore_errors=True)


def _compile(lib: Path, python: str) -> None:
    """Bytecode of that very Python, where this machine has it: sandboxes cannot keep any of their own."""
    for stale in list(lib.rglob("__pycache__")):
        shutil.rmtree(stale)
    ours = f"{sys.version_info.major}.{sys.version_info.minor}" == python
    if program := sys.executable if ours else shutil.which(f"python{python}"):
        # Not checked against the source's time: a layer never changes.
        argv = [program, "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(lib)]
        subprocess.run(argv, capture_output=True, timeout=_TIMEOUT, check=False, env={**os.environ, "HOME": str(lib)})
