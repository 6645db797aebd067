"""Pulling without a daemon: tokens, lists, redirects, damage, and what is cached."""

import base64
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.images import ImageStore, reference
from sandlot.sandbox.images.registry import Puller, stored_credentials
from support.image_files import ARCHITECTURE, FakeRegistry, make_image, make_tar, registry, write_layout

LAYERS = [
    make_tar([("etc/os-release", b"tiny\n"), ("gone", b"x")]),
    make_tar([(".wh.gone", b""), ("data", b"y" * 9000)]),
]


@pytest.fixture
def served() -> Iterator[FakeRegistry]:
    with registry(FakeRegistry({"team/tiny": make_image(LAYERS, ["PATH=/opt/bin:/usr/bin", "A=b"])})) as fake:
        yield fake


@pytest.fixture(autouse=True)
def _no_skopeo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    made = ImageStore(tmp_path / "images", None, 1000)
    yield made
    made.close()


def _puller(fake: FakeRegistry, name: str = "team/tiny") -> Puller:
    return Puller(reference.parse(fake.reference(name)), ARCHITECTURE, pause=0.0)


def test_references() -> None:
    for text, host, name, wanted in (
        ("docker://alpine", "registry-1.docker.io", "library/alpine", "latest"),
        ("swebench/sweb.eval.x86_64.a__b-1:v1", "registry-1.docker.io", "swebench/sweb.eval.x86_64.a__b-1", "v1"),
        ("docker://ghcr.io/a/b:1.2", "ghcr.io", "a/b", "1.2"),
        ("localhost:5000/x", "localhost:5000", "x", "latest"),
        (f"quay.io/a/b:t@sha256:{'0' * 64}", "quay.io", "a/b", f"sha256:{'0' * 64}"),
    ):
        found = reference.parse(text)
        assert (found.host, found.name, found.wanted) == (host, name, wanted)
    assert reference.parse("localhost:5000/x").base == "http://localhost:5000"
    assert reference.parse("127.0.0.1.evil.com/x").base == "https://127.0.0.1.evil.com"
    for bad in ("docker://", "docker://UPPER", "a/../b", "x:", "x@sha256:12", "ghcr.io/", "h o/x", "a b"):
        with pytest.raises(SandboxUnavailableError, match="no image reference"):
            reference.parse(bad)


def test_an_image_is_pulled_flattened_and_kept(served: FakeRegistry, store: ImageStore) -> None:
    image = store.get(served.reference("team/tiny"), "/workspace")
    root = Path(image.lowers[0])
    assert (root / "etc/os-release").read_text() == "tiny\n"
    assert not (root / "gone").exists()
    assert "agent:x:1000:1000:" in (root / "etc/passwd").read_text()
    assert (root / "home/agent").is_dir()
    assert dict(image.env) == {"PATH": "/opt/bin:/usr/bin", "A": "b"}
    seen = len(served.requests)
    assert store.get(served.reference("team/tiny"), "/workspace") == image
    assert store.get(served.reference("team/tiny").removeprefix("docker://"), "/workspace") == image
    assert len(served.requests) == seen


def test_credentials_stay_with_the_registry(served: FakeRegistry, tmp_path: Path) -> None:
    _puller(served).pull(tmp_path / "layout", _puller(served).digest())
    blobs = [authorization for path, authorization in served.requests if path.startswith("/cdn/")]
    assert len(blobs) == 3
    assert set(blobs) == {""}


def test_a_private_registry(served: FakeRegistry, store: ImageStore, tmp_path: Path) -> None:
    served.password = "s3cret"
    with pytest.raises(SandboxError, match=r"refuses .*docker login"):
        store.get(served.reference("team/tiny"), "/w")
    (tmp_path / "docker").mkdir()
    auth = base64.b64encode(b"me:s3cret").decode()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {served.host: {"auth": auth}}}))
    assert stored_credentials(served.host) == ("me", "s3cret")
    assert stored_credentials("other") is None
    assert store.get(served.reference("team/tiny"), "/w").lowers


def test_what_may_be_repeated_is(served: FakeRegistry, tmp_path: Path) -> None:
    layers = served.images["team/tiny"].layers
    served.faults = {"manifests/latest": 503, layers[0]: "cut", f"/v2/team/tiny/blobs/{layers[1]}": 429}
    puller = _puller(served)
    puller.pull(tmp_path / "layout", puller.digest())
    assert served.faults == {}
    assert len(list((tmp_path / "layout/blobs/sha256").iterdir())) == 4


def test_another_content_than_asked_for_is_refused(served: FakeRegistry, tmp_path: Path) -> None:
    image = served.images["team/tiny"]
    for name in (image.layers[0], image.config):
        good = image.blobs[name]
        image.blobs[name] = bytes(len(good))
        with pytest.raises(SandboxError, match="could not be pulled"):
            _puller(served).pull(tmp_path / name, image.manifest)
        image.blobs[name] = good
    image.blobs[image.manifest] += b" "
    with pytest.raises(SandboxError, match=f"not {image.manifest}"):
        _puller(served).pull(tmp_path / "manifest", image.manifest)


def test_errors_name_the_image(served: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"no image .*team/none:latest"):
        _puller(served, "team/none").digest()
    small = _puller(served)
    small.max_bytes = 100
    with pytest.raises(SandboxError, match="larger than 100 bytes"):
        small.pull(tmp_path / "layout", served.images["team/tiny"].manifest)
    foreign = Puller(reference.parse(served.reference("team/tiny")), "riscv64", pause=0.0)
    with pytest.raises(SandboxError, match=r"linux/riscv64.*linux/s390x"):
        foreign.pull(tmp_path / "foreign", served.images["team/tiny"].manifest)
    gone = Puller(reference.parse("docker://127.0.0.1:9/x"), ARCHITECTURE, pause=0.0)
    with pytest.raises(SandboxError, match="could not be pulled"):
        gone.digest()


def test_many_at_once_pull_once(served: FakeRegistry, tmp_path: Path) -> None:
    stores = [ImageStore(tmp_path / "images", None, 1000) for _ in range(6)]
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda s=s: found.append(s.get(served.reference("team/tiny"), "/w"))) for s in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len({str(image) for image in found}) == 1
    assert len([path for path, _ in served.requests if path.startswith("/cdn/")]) == 3
    for one in stores:
        one.close()


def test_the_cache_is_bounded_and_spares_what_is_used(tmp_path: Path) -> None:
    def layout(name: str) -> str:
        return str(write_layout(make_image([make_tar([(name, os.urandom(200_000))])]), tmp_path / name))

    ours = ImageStore(tmp_path / "images", None, 1000, max_bytes=900_000)
    used = ours.get(layout("used"), "/w").lowers[0]
    others = []
    for name in ("one", "two", "three", "four"):
        other = ImageStore(tmp_path / "images", None, 1000, max_bytes=900_000)
        others.append(other.get(layout(name), "/w").lowers[0])
        other.close()
    assert Path(used).is_dir()
    assert [Path(path).is_dir() for path in others] == [False, False, True, True]
    with pytest.raises(SandboxError, match="larger than"):
        ours.get(str(write_layout(make_image([make_tar([("x", bytes(1_000_000))])]), tmp_path / "x")), "/w")
    assert not list((tmp_path / "images").glob("*/building-*"))
    ours.close()


def test_what_a_killed_process_was_building_is_removed(tmp_path: Path, store: ImageStore) -> None:
    directory = tmp_path / "images/single"
    (directory / "building-1-dead/files").mkdir(parents=True)
    (directory / "building-1-dead.building").touch()
    store.get(str(write_layout(make_image(LAYERS), tmp_path / "layout")), "/w")
    assert not list(directory.glob("building-*"))


def test_a_skopeo_that_hangs_is_given_up(
    store: ImageStore, served: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "skopeo").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr("sandlot.sandbox.images.store._PULL_SECONDS", 0.2)
    with pytest.raises(SandboxError, match="skopeo did not pull"):
        store.get(served.reference("team/tiny"), "/workspace")
