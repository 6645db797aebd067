"""SGLang's own definitions of its HTTP interface, taken from its wheel: one file that needs nothing of the rest.

The package itself wants a GPU's libraries. The wheel is downloaded once into the cache, by its hash.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from sandlot.cache import cache_dir, locked

VERSION = "0.5.23"
_WHEEL = f"sglang-{VERSION}-cp311-cp311-manylinux_2_34_x86_64.whl"
_SHA256 = "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
_MEMBER = "sglang/api/v1/api_types.py"


@cache
def load() -> ModuleType:
    """The module, or a skipped test where the wheel cannot be had."""
    file = cache_dir() / "tests" / f"sglang-{VERSION}-api_types.py"
    with locked(file.with_suffix(".lock")):
        if not file.exists():
            _extract(file)
    spec = importlib.util.spec_from_file_location("sglang_api_types", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _extract(file: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        command += ["--only-binary", ":all:", "--platform", "manylinux_2_34_x86_64", "--python-version", "3.11"]
        done = subprocess.run([*command, f"sglang=={VERSION}"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"SGLang's wheel cannot be downloaded: {done.stderr.strip()[-200:]}")
        wheel = Path(scratch) / _WHEEL
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == _SHA256
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(_MEMBER)
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(file)
