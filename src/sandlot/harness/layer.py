"""A shared read-only layer below `/opt/sandlot`: made once per machine, whole or not at all, kept in the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sandlot.cache import cache_dir, locked
from sandlot.errors import ConfigError
from sandlot.sandbox import Layer

MOUNT_ROOT = "/opt/sandlot"

Progress = Callable[[str], None]


def make_layer(
    name: str, *, version: str, recipe: Any, entry: str, packages: Mapping[str, Any], fill: Callable[[Path], None]
) -> Layer:
    """The layer `/opt/sandlot/<name>`, made now if this machine lacks it.

    `recipe` is all that its content depends on, as JSON can hold it; `entry` the file that must be there to run;
    `packages` what its manifest says it holds. `fill` gets an empty directory. Blocking; safe to call from many
    threads and processes at once.
    """
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    root = cache_dir() / "layers"
    target = root / f"{name}-{version}-{key}"
    layer = Layer(target, f"{MOUNT_ROOT}/{name}")
    if _complete(target, entry):
        return layer
    with locked(root / f".{name}.lock"):
        if _complete(target, entry):
            return layer
        for left_behind in [target, *root.glob(f".new-{name}-*")]:
            shutil.rmtree(left_behind, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".new-{name}-", dir=root))
        try:
            content = fresh / "layer"
            content.mkdir()
            fill(content)
            if not (content / entry).is_file():
                raise ConfigError(f"{name} {version} has no {entry}: correct its pin or its entry")
            (content / "layer.json").write_text(json.dumps({"packages": packages}, indent=2) + "\n")
            (content / "layer.json").chmod(0o644)
            for directory in [content, *(d for d in content.rglob("*") if d.is_dir())]:
                directory.chmod(0o755)  # whatever the umask: the sandbox's users read it too
            content.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return layer


def with_path(directory: str, argv: Sequence[str]) -> tuple[str, ...]:
    """`argv` run with a directory of the layers after all others on PATH: what the image has comes first."""
    return ("/bin/sh", "-c", f'PATH="$PATH:{MOUNT_ROOT}/{directory}" exec "$0" "$@"', *argv)


def installers() -> list[list[str]]:
    """How to call pip, and uv as pip: those that are here, pip first, for it knows the machine's settings."""
    found = [[sys.executable, "-m", "pip", "--disable-pip-version-check"]] if find_spec("pip") else []
    if find_spec("uv"):
        found.append([sys.executable, "-m", "uv", "pip"])
    elif uv := shutil.which("uv"):
        found.append([uv, "pip"])
    return found


def _complete(target: Path, entry: str) -> bool:
    return (target / "layer.json").is_file() and (target / entry).is_file()
