"""The root of a sandbox: an overlay over its image, laid ahead of the order where it can be guessed which image.

The run's mount points are in use only in the keeper's own namespace, so that sandboxes need none of their own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from sandlot.sandbox.jail import mounts, syscalls, tree
from sandlot.sandbox.jail.syscalls import MS_NODEV, MS_NOSUID

_SIDES = ("upper", "work")


class Ground:
    """A detached overlay, `root`, whose writable side lies in `directory`; `image_owner` says whose its files are."""

    def __init__(self, spec: dict[str, Any], directory: str, userns: int | None) -> None:
        for name in _SIDES:
            os.mkdir(f"{directory}/{name}", 0o755)
        if spec["owner"] is not None:
            os.chown(f"{directory}/upper", spec["owner"], spec["owner"])
        self._directory, self._lowers = directory, _lowers(spec)
        os.chdir(directory)  # one page must hold all paths
        lowers, self.image_owner, image_point = [*self._lowers], "mapped", ""
        if not spec["image_is_prepared"]:
            image_point = lowers[-1] = f"{spec['run']}/image"
            fd, mapped = mounts.open_read_only(spec["image"], userns)
            try:
                syscalls.move_mount(fd, image_point)
            finally:
                os.close(fd)
            self.image_owner = "mapped" if mapped or userns is None else "unmapped"
        kind = "" if userns is not None else ",userxattr"
        below = ":".join(os.path.relpath(path) for path in lowers)
        point = f"{spec['run']}/root"
        options = f"lowerdir={below},upperdir=upper,workdir=work,volatile{kind}"
        syscalls.mount("overlay", point, "overlay", MS_NODEV | MS_NOSUID, options)
        self.root = syscalls.open_tree(point)
        syscalls.umount(point)
        if image_point:
            syscalls.umount(image_point)

    @classmethod
    def guessed(cls, spec: dict[str, Any], userns: int | None) -> Ground | None:
        """For a sandbox like the last one, `spec`; None where its files may change, or nothing can be laid now."""
        if not spec.get("is_lasting"):
            return None
        directory = f"{spec['run']}/spares/{os.getpid()}"
        try:
            os.mkdir(directory, 0o700)
            return cls(spec, directory, userns)
        except OSError:
            tree.remove(directory)  # the order will show what is wrong
            return None

    def fits(self, spec: dict[str, Any]) -> bool:
        """Whether a sandbox would get the same."""
        return bool(spec["is_lasting"]) and self._lowers == _lowers(spec)

    def move(self, directory: str) -> None:
        """Move the writable side, below the mounted overlay."""
        for name in _SIDES:
            os.rename(f"{self._directory}/{name}", f"{directory}/{name}")
        os.rmdir(self._directory)

    def discard(self) -> None:
        """Remove it, unused."""
        os.close(self.root)
        os.chdir("/")
        with suppress(OSError):
            tree.remove(self._directory)


def _lowers(spec: dict[str, Any]) -> list[str]:
    return [*spec["lowers"], spec["image"]]
