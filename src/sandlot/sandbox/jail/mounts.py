"""The file system of a sandbox: an overlay over the image, read-only trees, and a root of its own.

Trees are opened as detached mounts while the machine's paths are still visible, and attached after the root was
changed, so every target path is resolved inside the sandbox, whatever links its image holds.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from sandlot.sandbox.jail import syscalls, wire
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

STAGE = "/dev"
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus")
_MASKED_PROC = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug", "kmsg")
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV


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


class Furniture(NamedTuple):
    """What every sandbox has, mounted on a stage in a namespace that the sandbox will have: open /proc and /dev."""

    proc: int
    dev: int


def furnish() -> Furniture:
    """In the namespaces of a sandbox that has no root yet: make its /proc and /dev, on a stage over the machine's."""
    nodes = [(syscalls.open_tree(f"/dev/{name}"), name) for name in _NODES]
    syscalls.mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=8")
    for name in ("root", "proc", "dev"):
        os.mkdir(f"{STAGE}/{name}", 0o755)
    syscalls.mount("proc", f"{STAGE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    dev = f"{STAGE}/dev"
    syscalls.mount("tmpfs", dev, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=64")
    for fd, name in nodes:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        syscalls.move_mount(fd, f"{dev}/{name}")
        os.close(fd)
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}", 0o755)
    syscalls.mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
    for name, value in {**links, "stderr": "/proc/self/fd/2"}.items():
        os.symlink(value, f"{dev}/{name}")
    return Furniture(syscalls.open_mount(f"{STAGE}/proc"), syscalls.open_mount(dev))


def protect_proc() -> None:
    """Make what tunes or shows the kernel read-only or empty; what is open for writing stays so."""
    for name in _READ_ONLY_PROC:
        path = f"{STAGE}/proc/{name}"
        if os.path.exists(path):
            syscalls.mount(path, path, None, MS_BIND | MS_REC)
            flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            syscalls.mount(None, path, None, flags)
    for name in _MASKED_PROC:
        path = f"{STAGE}/proc/{name}"
        if os.path.exists(path):
            syscalls.mount(f"{STAGE}/dev/null", path, None, MS_BIND)


def enter(root: int, trees: list[tuple[int, str]], furniture: Furniture, shm_bytes: int) -> None:
    """Make `root` the root, move in the furniture, lose the old root, attach the trees. Closes what it was given."""
    syscalls.move_mount(root, f"{STAGE}/root")
    os.chdir(f"{STAGE}/root")
    syscalls.pivot_root(".", ".")
    # The old root is now stacked under the working directory, with the furniture; paths are resolved in the new one.
    for name in ("proc", "dev", "sys", "run", "tmp", "var/tmp"):
        _directory("/" + name)
    syscalls.move_mount(furniture.proc, "/proc")
    syscalls.move_mount(furniture.dev, "/dev")
    syscalls.mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={shm_bytes}")
    syscalls.umount(".")
    os.chdir("/")
    for fd, target in trees:
        _directory(target)
        syscalls.move_mount(fd, target)
    for directory in ("/tmp", "/var/tmp"):
        if stat.S_IMODE(os.stat(directory).st_mode) != 0o1777:  # each needless change is a copy of the directory
            with suppress(OSError):
                os.chmod(directory, 0o1777)
    wire.close_all((root, *furniture, *(fd for fd, _ in trees)))


def _directory(path: str) -> None:
    if not os.path.isdir(path):
        with suppress(FileExistsError):
            os.makedirs(os.path.realpath(path), 0o755)  # a link to nothing gets something
