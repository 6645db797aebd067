"""Where the layers of an image lie: a rootfs archive, an OCI layout, or what `docker save` and Podman write."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from sandlot.errors import SandboxError

_MAX_JSON = 8 << 20
_LISTS = {
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}


@dataclass(frozen=True)
class Layers:
    """Names of layer blobs, lowest first, and the environment that the image asks for."""

    names: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Blobs:
    """The files of an image, by name: in a directory, or in an uncompressed archive."""

    def __init__(self, path: Path) -> None:
        self._directory = path if path.is_dir() else None
        self._archive = None if path.is_dir() else tarfile.open(path, "r:")  # noqa: SIM115
        self._members: dict[str, tarfile.TarInfo] = {}
        if self._archive is not None:
            try:
                for member in self._archive:
                    self._members[member.name.removeprefix("./")] = member
            except BaseException:
                self._archive.close()
                raise

    def __enter__(self) -> Blobs:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._archive is not None:
            self._archive.close()

    def has(self, name: str) -> bool:
        """Whether there is a file `name`."""
        return name in self._members if self._directory is None else (self._directory / name).is_file()

    def open(self, name: str) -> IO[bytes]:
        """The content of `name`; links of an archive are followed among its own members only."""
        if ".." in name.split("/")[:1] or name.startswith("/"):
            raise SandboxError(f"the image names a file outside of itself: {name!r}", retryable=False)
        try:
            if self._directory is not None:
                return (self._directory / name).open("rb")
            assert self._archive is not None
            found = self._archive.extractfile(self._members[name])
        except (OSError, KeyError, RecursionError) as error:
            raise SandboxError(f"the image lacks its file {name}", retryable=False) from error
        if found is None:
            raise SandboxError(f"{name} in the image is no file", retryable=False)
        return found

    def json(self, name: str) -> Any:
        """A small JSON document."""
        with self.open(name) as file:
            data = file.read(_MAX_JSON + 1)
        try:
            if len(data) > _MAX_JSON:
                raise ValueError("it is too large")
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SandboxError(f"{name} in the image cannot be read: {error}", retryable=False) from error

    def verified(self, digest: str) -> str:
        """The name of the blob `digest`, after its content was found to be that."""
        name = blob_name(digest)
        with self.open(name) as file:
            found = hashlib.file_digest(cast("Any", file), "sha256").hexdigest()
        if found != digest.removeprefix("sha256:"):
            raise SandboxError(f"the image's blob {digest} is damaged: its digest is sha256:{found}", retryable=False)
        return name


def blob_name(digest: str) -> str:
    """The path of a blob in an OCI layout; only sha256 is known."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise SandboxError(f"the image names a blob by the unknown digest {digest[:100]!r}", retryable=False)
    return f"blobs/sha256/{value}"


def read_layers(blobs: Blobs, architecture: str) -> Layers | None:
    """The layers of an OCI layout or docker-archive, None when it is neither."""
    try:
        if blobs.has("index.json") and (blobs.has("oci-layout") or not blobs.has("manifest.json")):
            return _oci(blobs, choose(blobs.json("index.json"), architecture), architecture)
        if blobs.has("manifest.json"):
            (image,) = blobs.json("manifest.json")
            names = tuple(str(name) for name in image["Layers"])
            return Layers(names, _environment(blobs.json(str(image["Config"]))))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SandboxError(f"the image's manifest is not understood: {error!r}", retryable=False) from error
    return None


def _oci(blobs: Blobs, descriptor: Mapping[str, Any], architecture: str) -> Layers:
    for _ in range(4):  # an index may name an index
        manifest = blobs.json(blobs.verified(str(descriptor["digest"])))
        if "manifests" not in manifest:
            break
        descriptor = choose(manifest, architecture)
    names = tuple(blobs.verified(str(layer["digest"])) for layer in manifest["layers"])
    return Layers(names, _environment(blobs.json(blobs.verified(str(manifest["config"]["digest"])))))


def choose(index: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """The entry of an index or manifest list for Linux on this architecture."""
    entries = [entry for entry in index["manifests"] if isinstance(entry, dict)]
    known = [entry for entry in entries if "platform" in entry]
    for entry in known:
        platform = entry["platform"]
        if (platform.get("os"), platform.get("architecture")) == ("linux", architecture):
            return cast("Mapping[str, Any]", entry)
    bare = [entry for entry in entries if "platform" not in entry]
    if len(bare) == 1:
        return bare[0]
    offered = sorted({f"{e['platform'].get('os')}/{e['platform'].get('architecture')}" for e in known})
    what = f"it offers {', '.join(offered)}" if offered else f"it holds {len(bare)} images"
    raise SandboxError(f"there is no one image for linux/{architecture} in the index; {what}", retryable=False)


def is_list(manifest: Mapping[str, Any], media_type: str) -> bool:
    """Whether a manifest lists others."""
    return media_type in _LISTS or "manifests" in manifest


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    pairs = [str(line).partition("=") for line in (config.get("config") or {}).get("Env") or []]
    return {name: value for name, _, value in pairs if name and "\0" not in name + value}


@contextmanager
def decompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The content of a seekable file, decompressed by what its first bytes say: gzip, xz, bzip2, zstd or nothing."""
    head = file.read(6)
    file.seek(0)
    with ExitStack() as stack:
        if head.startswith(b"\x1f\x8b"):
            yield cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=file)))
        elif head.startswith(b"\xfd7zXZ"):
            yield cast("IO[bytes]", stack.enter_context(lzma.LZMAFile(file)))
        elif head.startswith(b"BZh"):
            yield cast("IO[bytes]", stack.enter_context(bz2.BZ2File(file)))
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            yield stack.enter_context(_zstd(file))
        else:
            yield file


@contextmanager
def _zstd(file: IO[bytes]) -> Iterator[IO[bytes]]:
    try:
        import zstandard
    except ImportError:
        with _zstd_program(file) as stream:
            yield stream
        return
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False) as reader:
            yield cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", reader), 1 << 18))
    except zstandard.ZstdError as error:
        raise tarfile.ReadError(str(error)) from error


@contextmanager
def _zstd_program(file: IO[bytes]) -> Iterator[IO[bytes]]:
    if shutil.which("zstd") is None:
        raise SandboxError("a layer is compressed with zstd: pip install zstandard, or install zstd", retryable=False)
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        copy.seek(0)
        with subprocess.Popen(["zstd", "-dc"], stdin=copy, stdout=subprocess.PIPE, stderr=-3) as process:
            assert process.stdout is not None
            try:
                yield process.stdout
                if process.wait() > 0:
                    raise tarfile.ReadError("zstd found the data damaged")
            finally:
                process.kill()
