"""What a spec of a local sandbox asks to stand on: an image as the files below the writable side, and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandlot.errors import SandboxUnavailableError
from sandlot.sandbox.base import DOCKERFILE, SandboxSpec
from sandlot.sandbox.images import reference


@dataclass(frozen=True)
class Base:
    """The read-only files below a sandbox: directories of the image, uppermost first, and trees mounted on them.

    `prepared`: owners are the sandbox's already; otherwise they are mapped at each boot.
    """

    lowers: tuple[str, ...]
    prepared: bool
    binds: tuple[tuple[str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def layer_binds(spec: SandboxSpec) -> list[tuple[str, str]]:
    """(source, path inside) of the layers of a spec."""
    return [(str(layer.source.resolve()), layer.mount_point) for layer in spec.layers]


def is_packed(image: str) -> bool:
    """Whether an image must be unpacked before it can be used; a root directory need not be."""
    path = Path(image)
    if image.startswith(DOCKERFILE):
        raise SandboxUnavailableError(
            f"the local backend builds no Dockerfile ({image}): take --sandbox docker, or build the image and name it"
        )
    if not path.is_absolute() and not path.exists():
        reference.parse(image)
        return True
    if not path.is_absolute() or not path.exists():
        raise SandboxUnavailableError(
            f"image {image!r} is neither `host`, nor a name as Docker takes it, nor an absolute path of a root "
            "directory, rootfs archive, OCI layout or docker-archive"
        )
    return not path.is_dir() or (path / "index.json").is_file()
