"""Python and pytest for sandboxes that boot the machine's own system: a shared layer in pinned versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from sandlot.cache import cache_dir, locked
from sandlot.errors import ConfigError
from sandlot.sandbox import Layer
from sandlot.sandbox.host_python import host_python, system_python

MOUNT_POINT = "/opt/sandlot/python-tests"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REQUIREMENTS = """\
iniconfig==2.1.0 --hash=sha256:9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760
packaging==25.0 --hash=sha256:29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484
pluggy==1.6.0 --hash=sha256:e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746
pygments==2.19.2 --hash=sha256:86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b
pytest==8.4.2 --hash=sha256:872f880de3fc3a5bdc88a11b39c9710c3497a547cfa9320bc3c5e62fbf272e79
"""


def runtime_layers(image: str = "host") -> tuple[Layer, ...]:
    """The layers that give a `host` sandbox Python and pytest; none for other images, which bring their own.

    Blocking at the first call on a machine: run it in a thread.
    """
    if image != "host":
        return ()
    layers = [test_runtime_layer()]
    if system_python() is None:
        layers.append(Layer(Path(sys.base_prefix), sys.base_prefix))
    return tuple(layers)


def runtime_env(image: str = "host") -> dict[str, str]:
    """The environment that makes `python`, `python3` and `pytest` work with those layers."""
    if image != "host":
        return {}
    path = [f"{MOUNT_POINT}/bin", _SYSTEM_PATH]
    if system_python() is None:
        path.insert(1, f"{sys.base_prefix}/bin")
    return {"PATH": ":".join(path), "PYTHONPATH": f"{MOUNT_POINT}/lib", "PYTHONDONTWRITEBYTECODE": "1"}


def interpreter(image: str) -> str:
    """The interpreter that runs tests: its path, or a name to look up in the image."""
    if image != "host":
        return "python"
    return host_python()


def libraries(image: str) -> list[str]:
    """Where the test runner is imported from; empty: from the image's own environment."""
    return [f"{MOUNT_POINT}/lib"] if image == "host" else []


def test_runtime_layer() -> Layer:
    """pytest in pinned versions, installed once per machine. Raises `ConfigError` when no installer can get it."""
    return Layer(_installed(cache_dir()), MOUNT_POINT)


test_runtime_layer.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name


@cache
def _installed(home: Path) -> Path:
    place = home / "layers" / f"python-tests-{_key()}"
    with locked(place.parent / f"{place.name}.lock"):
        if not place.is_dir():
            scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
            try:
                _install(scratch)
                scratch.chmod(0o755)
                scratch.rename(place)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return place


def _key() -> str:
    import hashlib

    return hashlib.sha256(f"{REQUIREMENTS}{host_python()}1".encode()).hexdigest()[:16]


def _install(place: Path) -> None:
    requirements = place / "requirements.txt"
    requirements.write_text(REQUIREMENTS)
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    target = ["--target", str(place / "lib")]
    said = "neither pip nor uv is here"
    for installer in ([sys.executable, "-m", "pip", "install", "--quiet"], ["uv", "pip", "install", "--quiet"]):
        try:
            done = subprocess.run([*installer, *target, *options], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            break
        said = done.stderr.strip()[-1500:]
    else:
        raise ConfigError(f"pytest for the sandboxes could not be installed (is a package index reachable?): {said}")
    shutil.rmtree(place / "lib" / "bin", ignore_errors=True)
    programs = place / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        (programs / name).symlink_to(host_python())
    for name in ("pytest", "py.test"):
        (programs / name).write_text(f'#!/bin/sh\nexec {host_python()} -m pytest "$@"\n')
        (programs / name).chmod(0o755)
