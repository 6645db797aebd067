"""What a spec means for a container."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sandlot.errors import SandboxUnavailableError
from sandlot.sandbox.base import Layer, Limits, SandboxSpec
from sandlot.sandbox.refusals import check_paths


def mounts(layers: Iterable[Layer]) -> list[dict[str, Any]]:
    """The layers as read-only binds."""
    return [
        {"Type": "bind", "Source": str(layer.source.resolve()), "Target": layer.mount_point, "ReadOnly": True}
        for layer in layers
    ]


def ulimits(limits: Limits) -> list[dict[str, Any]]:
    """Each is named, since what is not named Podman raises, which not every root may."""
    bounds = {"nofile": limits.open_files, "core": 0, "fsize": limits.disk, "nproc": 4096}
    return [{"Name": name, "Soft": bound, "Hard": bound} for name, bound in bounds.items()]


def check(spec: SandboxSpec) -> None:
    """Refuse what a container cannot be."""
    if spec.image.startswith("/"):
        raise SandboxUnavailableError(
            f"the docker backend boots no files; load {spec.image} into the daemon and name it"
        )
    check_paths(spec)
