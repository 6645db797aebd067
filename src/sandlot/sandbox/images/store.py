"""The cache of flattened images: made once under a lock, shared by all processes, bounded in size."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandlot.cache import Kept, Shelf, locked
from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.images import layers, ownership, reference, registry
from sandlot.sandbox.images.unpack import BAD_ARCHIVE, Unpacker
from sandlot.sandbox.jail import tree

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PULL_SECONDS = 3600.0
_VERSION = 1
"""Part of every key: raise it when the same image would be flattened to something else."""


@dataclass(frozen=True)
class Image:
    """Flattened directories, the uppermost first, and the environment that the image asks for."""

    lowers: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class ImageStore:
    """Flattened images below `directory`. `owner` is the id outside of root inside, None where there is one id only, 0
    for a process that has the sandboxes' ids itself.

    What a process got stays until it calls `close`, or dies; the rest may be removed to keep within `max_bytes`.
    """

    def __init__(self, directory: Path, owner: int | None, agent_id: int, *, max_bytes: int = 64 << 30) -> None:
        self._directory = directory / ("single" if owner is None else "range" if owner else "subordinate")
        self._owner, self._agent_id, self._max_bytes = owner, agent_id, max_bytes
        self._shelf = Shelf(self._directory, max_bytes=max_bytes, remove=tree.remove)
        self._held: dict[str, Kept] = {}

    def get(self, name: str, workdir: str) -> Image:
        """The image `name` (archive, OCI layout or reference), with `workdir` owned by the agent. Blocks."""
        if Path(name).is_absolute():
            key, make = self._from_path(Path(name))
        else:
            key, make = self._from_registry(reference.parse(name))
        root = self._made(key, make)
        env = json.loads((root / "about.json").read_text())["env"]
        lowers = [str(root / "files")]
        if self._owner is not None:
            resolved = ownership.resolve(root / "files", workdir)
            if resolved is not None and ownership.is_foreign(root / "files" / resolved, self._owner + self._agent_id):
                owned = _key("workdir", key, resolved)

                def copy(target: Path) -> Mapping[str, str]:
                    assert self._owner is not None
                    agent = self._owner + self._agent_id
                    ownership.copy_owned(root / "files", resolved, target, agent)
                    return {}

                lowers.insert(0, str(self._made(owned, copy) / "files"))
        return Image(tuple(lowers), env)

    def close(self) -> None:
        """Let others remove what this process used."""
        for kept in self._held.values():
            kept.release()
        self._held.clear()

    def _from_path(self, path: Path) -> tuple[str, Callable[[Path], Mapping[str, str]]]:
        marker = path / "index.json" if path.is_dir() else path
        try:
            status = marker.stat()
        except OSError as error:
            raise SandboxUnavailableError(f"the image {path} cannot be read: {error.strerror}") from error
        identity = [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns), str(status.st_ino)]
        return _key("path", *identity), lambda target: self._flatten(path, target)

    def _from_registry(self, ref: reference.Reference) -> tuple[str, Callable[[Path], Mapping[str, str]]]:
        """A tag is looked up once and then stands for the same image, as with `docker run`; digests always do."""
        puller = registry.Puller(ref, _architecture(), registry.stored_credentials(ref.host))
        pin = self._directory / "tags" / _key("tag", str(ref))
        digest = ref.digest or _text(pin)
        if not digest:
            with locked(Path(f"{pin}.lock")):
                digest = _text(pin)
                if not digest:
                    digest = puller.digest()
                    _write_whole(pin, digest)

        def pull(target: Path) -> Mapping[str, str]:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="pull-") as temporary:
                layout = Path(temporary) / "layout"
                if not _skopeo(ref, digest, layout):
                    puller.pull(layout, digest)
                return self._flatten(layout, target)

        return _key("registry", ref.host, ref.name, digest, _architecture()), pull

    def _made(self, key: str, make: Callable[[Path], Mapping[str, str]]) -> Path:
        """The finished directory of `key`, made by whoever comes first, and held from now on."""

        def fill(place: Path) -> None:
            (place / "files").mkdir()
            env = make(place / "files")
            (place / "about.json").write_text(json.dumps({"env": dict(env)}))

        if key not in self._held or not self._held[key].path.is_dir():
            self._held[key] = self._shelf.get(key, fill)
        return self._held[key].path

    def _flatten(self, path: Path, target: Path) -> Mapping[str, str]:
        """Unpack an archive or layout into `target` and make it bootable; its environment."""
        unpacker = Unpacker(target, self._owner, max_bytes=self._max_bytes)
        try:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="open-") as temporary:
                whole = path if path.is_dir() else _opened(path, Path(temporary) / "archive")
                with layers.Blobs(whole) as blobs:
                    found = layers.read_layers(blobs, _architecture())
                    if found is None and whole.is_dir():
                        raise SandboxUnavailableError(f"{path} is neither a root file system nor an OCI layout")
                    for name in found.names if found else ():
                        with blobs.open(name) as file, layers.decompressed(file) as stream:
                            unpacker.apply(stream, name)
                if found is None:
                    with whole.open("rb") as file:
                        unpacker.apply(file, path.name)
            unpacker.finish()
        except BAD_ARCHIVE as error:
            raise SandboxError(f"the image {path} is damaged or no tar archive: {error}", retryable=False) from error
        finally:
            unpacker.close()
        ownership.prepare(target, self._owner, self._agent_id)
        return found.env if found else {}


def _opened(path: Path, copy: Path) -> Path:
    """`path` itself when it is an uncompressed archive, else its decompressed content at `copy`."""
    try:
        with path.open("rb") as file, layers.decompressed(file) as stream:
            if stream is file:
                return path
            with copy.open("wb") as target:
                shutil.copyfileobj(stream, target, 1 << 20)
    except (OSError, *BAD_ARCHIVE) as error:
        raise SandboxError(f"the image {path} cannot be decompressed: {error}", retryable=False) from error
    return copy


def _skopeo(ref: reference.Reference, digest: str, layout: Path) -> bool:
    """Pull with skopeo, which knows every way to log in; False where it is not installed."""
    if shutil.which("skopeo") is None:
        return False
    source = f"docker://{ref.host}/{ref.name}@{digest}".replace("registry-1.docker.io", "docker.io")
    plain = ["--src-tls-verify=false"] if ref.is_local else []
    command = [
        "skopeo",
        "copy",
        "--quiet",
        "--retry-times=3",
        "--override-os=linux",
        *plain,
        source,
        f"oci:{layout}:image",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PULL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SandboxError(f"skopeo did not pull {ref} within {_PULL_SECONDS:g} s; is the registry slow?") from None
    if done.returncode:
        said = done.stderr.strip().rpartition("msg=")[2] or f"exit {done.returncode}"
        raise SandboxError(f"skopeo could not pull {ref}: {said[:500]}")
    return True


def _architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((str(_VERSION), *parts)).encode("utf-8", "surrogateescape")).hexdigest()[:40]


def _text(path: Path) -> str:
    """What a file holds; nothing where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(text)
    os.replace(temporary, path)
