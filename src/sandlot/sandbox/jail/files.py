"""Reading and writing single files inside a sandbox, as its user; nothing but regular files is ever acted on."""

from __future__ import annotations

import errno
import os
import socket
import stat

from sandlot.sandbox.jail import syscalls, wire

_OPEN = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def become(uid: int, gid: int, *, keep_root: bool) -> None:
    """Act on files with the rights of a user.

    Only the effective ids change, so that processes of that user cannot signal this one. A real root keeps its
    capabilities; so does the single id of a sandbox without an id range when it acts for `root`.
    """
    if uid == 0 or keep_root:
        return
    if os.geteuid() == 0:
        os.setgroups([])
        os.setegid(gid)
        os.seteuid(uid)
    else:
        syscalls.set_capabilities(0)


def check_regular(fd: int, path: str) -> os.stat_result:
    """The status of an open regular file; links into /proc are refused, since their content is the reader's own."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_dev == os.stat("/proc").st_dev:
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return status


def send_file(channel: socket.socket, path: str) -> None:
    """Answer with the open file at `path`; the reader counts bytes."""
    fd = syscalls.openat2(syscalls.AT_FDCWD, path, os.O_RDONLY | _OPEN, syscalls.RESOLVE_NO_MAGICLINKS)
    status = check_regular(fd, path)
    wire.send_packet(channel, {"size": status.st_size}, [fd])


def write_file(path: str, source: int, mode: int) -> None:
    """Write the content of `source` to `path`, parents made."""
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, 0o755, exist_ok=True)
    fd = syscalls.openat2(
        syscalls.AT_FDCWD, path, os.O_WRONLY | os.O_CREAT | _OPEN, syscalls.RESOLVE_NO_MAGICLINKS, 0o600
    )
    try:
        check_regular(fd, path)
        os.ftruncate(fd, 0)
        copy(source, fd, os.fstat(source).st_size)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def copy(source: int, target: int, size: int) -> None:
    """Copy `size` bytes from the start of `source`."""
    offset = 0
    while offset < size:
        sent = os.sendfile(target, source, offset, min(size - offset, 1 << 30))
        if sent == 0:
            raise OSError(errno.EIO, "the source is shorter than it was")
        offset += sent
