"""The Linux calls that Python does not offer, by ctypes; every failure is an `OSError` that names the call."""

from __future__ import annotations

import ctypes
import os
import struct

from sandlot.sandbox.jail.posix import opened

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_IDMAP = 0x00100000
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 2, 4, 8, 16

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
_CAP_VERSION_3 = 0x20080522

# Calls above 424 have one number on all architectures.
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(os.uname().machine, (-1, -1))

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(number: int, what: str, *args: object) -> int:
    return _check(int(_libc.syscall(ctypes.c_long(number), *args)), what)


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` for new ones."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def prctl(option: int, *args: int) -> int:
    """`prctl(2)` with integer arguments."""
    padded = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *padded), f"prctl {option}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """`mount(2)`."""
    encoded = [None if v is None else os.fsencode(v) for v in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {kind or source or ''} on {target}")


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """`umount2(2)`."""
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """`pivot_root(2)`."""
    _syscall(_PIVOT_ROOT, "pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def open_tree(path: str) -> int:
    """A detached, recursive copy of the mount at `path`, as an fd."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    return _syscall(_OPEN_TREE, f"open_tree {path}", AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), flags)


def open_mount(path: str) -> int:
    """The mount at `path` itself, as an fd by which it can be moved."""
    return _syscall(_OPEN_TREE, f"open_tree {path}", AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), os.O_CLOEXEC)


def move_mount(fd: int, target: str) -> None:
    """Attach the mount behind `fd` at `target`."""
    path = ctypes.c_char_p(os.fsencode(target))
    _syscall(_MOVE_MOUNT, f"move_mount to {target}", fd, ctypes.c_char_p(b""), AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH)


def mount_setattr(fd: int, attributes: int, userns: int = 0) -> None:
    """Set attributes on the detached mount behind `fd`, recursively; with MOUNT_ATTR_IDMAP, map ids by `userns`."""
    packed = struct.pack("QQQQ", attributes, 0, 0, userns)
    flags = AT_EMPTY_PATH | AT_RECURSIVE
    size = ctypes.c_size_t(len(packed))
    _syscall(_MOUNT_SETATTR, "mount_setattr", fd, ctypes.c_char_p(b""), flags, ctypes.c_char_p(packed), size)


def openat2(dirfd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """`open` with rules for how the path may be resolved."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    name = ctypes.c_char_p(os.fsencode(path))
    return _syscall(_OPENAT2, path, dirfd, name, ctypes.c_char_p(how), ctypes.c_size_t(len(how)))


def set_capabilities(mask: int) -> None:
    """Make `mask` the effective and permitted set, and empty the inheritable and ambient sets."""
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("IIIIII", low, low, 0, high, high, 0)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _syscall(_CAPSET, "capset", ctypes.c_char_p(header), ctypes.c_char_p(data))


def drop_bounding_capabilities(keep: int) -> None:
    """Take every capability outside `keep` out of the bounding set, for good."""
    for capability in range(64):
        if keep >> capability & 1:
            continue
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # EINVAL: beyond the kernel's last capability


def write_setting(path: str, text: str) -> None:
    """Write a setting of the kernel, whole in one call."""
    with opened(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as fd:
        os.write(fd, text.encode())


def install_filter(program: bytes) -> None:
    """Install a seccomp filter; needs no_new_privs."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    keep = ctypes.create_string_buffer(fprog, len(fprog))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(keep))
