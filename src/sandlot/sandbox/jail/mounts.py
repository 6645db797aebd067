"""The file system of a sandbox: an overlay over the image, read-only trees, and a root of its own.

Trees are opened as detached mounts while the machine's paths are still visible, and attached after the root was
changed, so every target path is resolved inside the sandbox, whatever links its image holds.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sandlot.sandbox.jail import syscalls
from sandlot.sandbox.jail.syscalls import (
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
)

_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus")
_MASKED_PROC = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug", "kmsg")
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV


@dataclass
class Plan:
    """Detached mounts waiting to be attached: the root, and (fd, path inside) of the others."""

    root: int = -1
    trees: list[tuple[int, str]] = field(default_factory=list)
    nodes: list[tuple[int, str]] = field(default_factory=list)
    image_owner: str = "mapped"

    def close(self) -> None:
        """Close the descriptors of this process."""
        for fd in (self.root, *(fd for fd, _ in [*self.trees, *self.nodes])):
            os.close(fd)


def make_private() -> None:
    """Keep mounts of this namespace and the machine's apart."""
    syscalls.mount(None, "/", None, MS_REC | MS_PRIVATE)


def open_read_only(path: str, userns: int | None) -> tuple[int, bool]:
    """A detached read-only copy of the tree at `path`, and whether its owners are mapped by `userns`."""
    fd = syscalls.open_tree(path)
    try:
        syscalls.mount_setattr(fd, _READ_ONLY)
        if userns is not None:
            try:
                syscalls.mount_setattr(fd, MOUNT_ATTR_IDMAP, userns)
                return fd, True
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
                    raise
    except BaseException:
        os.close(fd)
        raise
    return fd, False


def prepare(spec: dict[str, Any], userns: int | None) -> Plan:
    """Make the overlay (the working directory is the sandbox's own) and open all trees; nothing stays attached."""
    plan = Plan()
    lowers = [os.path.relpath(path) for path in spec["lowers"]]
    if spec["image_is_prepared"]:
        lowers.append(os.path.relpath(spec["image"]))
    else:
        fd, mapped = open_read_only(spec["image"], userns)
        try:
            syscalls.move_mount(fd, "image")
        finally:
            os.close(fd)
        lowers.append("image")
        plan.image_owner = "mapped" if mapped or userns is None else "unmapped"
    kind = "" if userns is not None else ",userxattr"
    options = f"lowerdir={':'.join(lowers)},upperdir=upper,workdir=work,volatile{kind}"
    syscalls.mount("overlay", "root", "overlay", MS_NODEV | MS_NOSUID, options)
    plan.root = syscalls.open_tree("root")
    syscalls.umount("root")  # the keeper must be able to remove these directories
    if "image" in lowers:
        syscalls.umount("image")
    for source, target in spec["binds"]:
        fd, _ = open_read_only(source, userns)
        plan.trees.append((fd, target))
    for name in _NODES:
        plan.nodes.append((syscalls.open_tree(f"/dev/{name}"), f"/dev/{name}"))
    return plan


def step_in(plan: Plan) -> None:
    """Attach the root in this namespace and make it the working directory, while its path may be searched."""
    syscalls.move_mount(plan.root, "root")
    os.chdir("root")


def enter(plan: Plan, shm_bytes: int) -> None:
    """In the new pid namespace: make the working directory the root, add what belongs in it, lose the old one."""
    syscalls.pivot_root(".", ".")
    # The old root is now stacked under the working directory; a fresh /proc needs it in sight once more.
    for name in ("proc", "dev", "sys", "run", "tmp", "var/tmp"):
        _directory("/" + name)
    syscalls.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    syscalls.mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=64")
    for fd, target in plan.nodes:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        syscalls.move_mount(fd, target)
    _directory("/dev/pts")
    syscalls.mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    _directory("/dev/shm")
    syscalls.mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={shm_bytes}")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
    for name, value in {**links, "stderr": "/proc/self/fd/2"}.items():
        os.symlink(value, f"/dev/{name}")
    syscalls.umount(".")
    os.chdir("/")
    for fd, target in plan.trees:
        _directory(target)
        syscalls.move_mount(fd, target)
    for directory in ("/tmp", "/var/tmp"):
        if stat.S_IMODE(os.stat(directory).st_mode) != 0o1777:  # each needless change is a copy of the directory
            with suppress(OSError):
                os.chmod(directory, 0o1777)
    plan.close()


def protect_proc() -> None:
    """Make what tunes or shows the kernel read-only or empty. Comes after init wrote its own settings."""
    for name in _READ_ONLY_PROC:
        path = f"/proc/{name}"
        if os.path.exists(path):
            syscalls.mount(path, path, None, MS_BIND | MS_REC)
            flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            syscalls.mount(None, path, None, flags)
    for name in _MASKED_PROC:
        path = f"/proc/{name}"
        if os.path.exists(path):
            syscalls.mount("/dev/null", path, None, MS_BIND)


def _directory(path: str) -> None:
    with suppress(FileExistsError):
        os.makedirs(os.path.realpath(path), 0o755)  # a link to nothing gets something
