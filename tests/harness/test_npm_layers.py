"""Shared layers: pinned, verified, made once, and clear about why not. The registry here is a local npm of one file."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandlot.errors import ConfigError
from sandlot.harness import layer as layers
from sandlot.harness import npm
from sandlot.harness.npm import Part, Pin, cpu, node_layer, npm_layer, pins

PACKAGE = "@example/agent"


def _archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data, mode in (
            ("package/bin/agent", b"#!/bin/sh\necho hi\n", 0o700),
            ("package/readme.md", b"words\n", 0o600),
            ("package/agent.js.map", b"{}", 0o644),
            ("package/../../escaped", b"no\n", 0o644),
        ):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("package/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return buffer.getvalue()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `npm` on PATH that hands out one archive and counts its calls; the pin matches the archive."""
    box = tmp_path / "bin"
    box.mkdir()
    (box / "agent.tgz").write_bytes(_archive())
    program = f"""#!{sys.executable}
import os, shutil, sys, time
with open({str(box / "calls")!r}, "a") as calls: calls.write(" ".join(sys.argv[1:]) + "\\n")
if os.path.exists({str(box / "fails")!r}): sys.exit(open({str(box / "fails")!r}).read())
time.sleep(0.2)
shutil.copy({str(box / "agent.tgz")!r}, sys.argv[sys.argv.index("--pack-destination") + 1])
"""
    (box / "npm").write_text(program)
    (box / "npm").chmod(0o755)
    digest = base64.b64encode(hashlib.sha512((box / "agent.tgz").read_bytes()).digest()).decode()
    monkeypatch.setattr(npm, "pins", lambda: {PACKAGE: Pin(PACKAGE, "1.2.3", f"sha512-{digest}")})
    monkeypatch.setenv("PATH", f"{box}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return box


def _layer() -> npm.Layer:
    return npm_layer("agent", [Part(PACKAGE, "app", lambda path: path.suffix == ".map")], entry="app/bin/agent")


def test_every_pin_is_exact() -> None:
    for pin in pins().values():
        assert re.fullmatch(r"\d+\.\d+\.\d+(-linux-(x64|arm64))?", pin.version)
        assert len(base64.b64decode(pin.integrity.removeprefix("sha512-"), validate=True)) == 64
    assert {f"node-linux-{cpu()}", f"@anthropic-ai/claude-code-linux-{cpu()}"} < set(pins())


def test_a_layer_holds_regular_files_readable_by_all(registry: Path) -> None:
    old = os.umask(0o077)
    try:
        layer = _layer()
    finally:
        os.umask(old)
    assert layer.mount_point == "/opt/sandlot/agent"
    found = {str(p.relative_to(layer.source)): p.stat().st_mode & 0o777 for p in layer.source.rglob("*")}
    assert found == {
        "layer.json": 0o644, "app": 0o755, "app/bin": 0o755, "app/bin/agent": 0o755, "app/readme.md": 0o644
    }  # fmt: skip
    assert layer.source.stat().st_mode & 0o777 == 0o755
    assert not list(registry.parent.rglob("escaped"))
    assert json.loads((layer.source / "layer.json").read_text())["packages"][PACKAGE]["version"] == "1.2.3"


def test_many_at_once_fetch_once(registry: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: _layer(), range(8)))
    assert len(set(made)) == 1
    assert len((registry / "calls").read_text().splitlines()) == 1
    assert [p.name for p in made[0].source.parent.iterdir() if p.name.startswith(".new-")] == []


def test_what_a_killed_install_left_is_removed(registry: Path) -> None:
    layer = _layer()
    (layer.source / "layer.json").unlink()
    torn = layer.source.parent / ".new-agent-torn"
    torn.mkdir()
    assert _layer() == layer
    assert (layer.source / "layer.json").is_file()
    assert not torn.exists()


def test_another_file_than_the_pinned_one_is_refused(registry: Path) -> None:
    (registry / "agent.tgz").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is not the pinned one"):
        _layer()
    assert not list((registry.parent / "cache/sandlot/layers").glob("agent-*"))


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("npm error code ENOTFOUND\nnpm error network request failed", "check the network"),
        ("npm error code ETARGET\nnpm error notarget No matching version", "use a registry that has this version"),
        ("npm error code E401\nnpm error Unable to authenticate", "log in to the registry"),
        ("npm error code ENOSPC", "make room on the disk"),
        ("", "it said nothing"),
    ],
)
def test_npm_that_fails_is_told_with_its_cure(registry: Path, said: str, cure: str) -> None:
    (registry / "fails").write_text(said)
    with pytest.raises(ConfigError, match=cure) as caught:
        _layer()
    assert f"{PACKAGE}@1.2.3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neither_npm_nor_pip_is_told(registry: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(layers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="npm is missing, and so are pip and uv"):
        _layer()


def test_another_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npm.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64"):
        node_layer()


@pytest.mark.slow
@pytest.mark.npm
def test_npm_from_the_python_package_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without npm: it comes in a wheel, and fetches a real package."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    part = Part("@silvia-odwyer/photon-node")
    layer = npm_layer("photon", [part], entry="photon_rs_bg.wasm")
    assert (layer.source / "photon_rs_bg.wasm").stat().st_size > 1_000_000
