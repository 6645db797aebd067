"""Layers of wheels: made once, compiled, readable by all, and clear about why not. The installer here is a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandlot.errors import ConfigError
from sandlot.harness import wheels
from sandlot.harness.mini_swe_agent import MiniSweAgent
from sandlot.harness.wheels import wheel_layer
from sandlot.sandbox import Layer

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALLER = """\
import pathlib, sys
if {fails!r}: sys.exit({fails!r})
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
assert "--require-hashes" in sys.argv and sys.argv[sys.argv.index("--python-version") + 1] == {python!r}
assert pathlib.Path(sys.argv[-1]).read_text() == "agent==1 --hash=sha256:00"
for path in ("agent/__init__.py", "agent/ui/big.js", "bin/agent"):
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    (target / path).write_text("")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _installers(monkeypatch, tmp_path, "")
    return tmp_path


def _installers(monkeypatch: pytest.MonkeyPatch, directory: Path, *fails: str) -> None:
    found = []
    for number, said in enumerate(fails):
        program = directory / f"installer{number}.py"
        program.write_text(INSTALLER.format(fails=said, python=PYTHON))
        found.append([sys.executable, str(program)])
    monkeypatch.setattr(wheels, "installers", lambda: found)


def _layer() -> Layer:
    return wheel_layer(
        "agent",
        "agent==1 --hash=sha256:00",
        version="1",
        python=PYTHON,
        files={"start.py": "import agent\n"},
        drop=("agent/ui",),
    )


def test_a_layer_is_compiled_and_readable_by_all(install: Path) -> None:
    old = os.umask(0o077)
    try:
        layer = _layer()
    finally:
        os.umask(old)
    assert layer.mount_point == "/opt/sandlot/agent"
    files = {str(p.relative_to(layer.source)): p.stat().st_mode & 0o777 for p in layer.source.rglob("*")}
    compiled = f"lib/agent/__pycache__/__init__.{sys.implementation.cache_tag}.pyc"
    assert files == {
        "layer.json": 0o644, "start.py": 0o644, "lib": 0o755, "lib/agent": 0o755, "lib/agent/__init__.py": 0o644,
        "lib/agent/__pycache__": 0o755, compiled: 0o644,
    }  # fmt: skip
    assert _layer() == layer


def test_what_one_installer_cannot_do_the_next_one_does(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installers(monkeypatch, install, "", "no such index")
    assert (_layer().source / "lib/agent").is_dir()


def test_why_it_cannot_be_made_is_told_with_its_cure(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installers(monkeypatch, install, "ERROR: hashes differ\n", "no such index")
    with pytest.raises(ConfigError, match=rf"agent 1 for Python {PYTHON} \(ERROR: hashes differ\): check the network"):
        _layer()
    _installers(monkeypatch, install)
    with pytest.raises(ConfigError, match="neither pip nor uv is here"):
        _layer()
    assert not list((install / "cache/sandlot/layers").glob("agent-*"))


def test_another_python_than_the_layers_is_told(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, str] = {}

    def keep(name: str, requirements: str, *, files: dict[str, str], **_: object) -> Layer:
        made.update(files)
        return Layer(install, "/opt/sandlot/x")

    monkeypatch.setattr("sandlot.harness.mini_swe_agent.wheel_layer", keep)
    MiniSweAgent(python="3.2").layers()
    (install / "start.py").write_text(made["start.py"])
    done = subprocess.run([sys.executable, "-I", install / "start.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"installed for Python 3.2, and this image has another: choose mini-swe-agent:python={PYTHON}" in done.stderr
