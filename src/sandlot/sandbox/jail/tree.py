"""Removing and measuring directory trees that a hostile program wrote; nothing in them is followed or trusted."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from sandlot.sandbox.jail.posix import opened

_MAX_DEPTH = 100  # descriptors held at once


def remove(path: str) -> None:
    """Remove a file or tree whatever its modes; nobody writes to it any more. Absent is fine."""
    parent, name = os.path.split(os.path.abspath(path))
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    with opened(fd):
        remove_at(fd, name)


def remove_at(root: int, name: str) -> None:
    """Remove the entry `name` of the open directory `root`, whatever it is. Absent is fine."""
    pending = [name]
    while pending:
        _remove_entry(root, pending.pop(), 0, root, pending)


def _remove_entry(parent: int, name: str, depth: int, root: int, pending: list[str]) -> None:
    """Depth first; what lies too deep is lifted up into `root` and left to `pending`."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    if depth == _MAX_DEPTH:
        lifted = f".lifted-{os.urandom(8).hex()}"
        _make_writable(parent, name)
        os.rename(name, lifted, src_dir_fd=parent, dst_dir_fd=root)
        pending.append(lifted)
        return
    directory = _open_directory(parent, name)
    if directory < 0:
        return
    with opened(directory):
        for entry in os.listdir(directory):
            _remove_entry(directory, entry, depth + 1, root, pending)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def _make_writable(parent: int, name: str) -> None:
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=parent)
    except FileNotFoundError:
        pass


def _open_directory(parent: int, name: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        _make_writable(parent, name)
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        return -1


def disk_usage(directory: int, stop_above: int) -> int:
    """Bytes of disk below the open directory, counted until `stop_above` is passed."""
    total = 0
    stack = [os.dup(directory)]
    try:
        while stack:
            fd = stack.pop()
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        try:
                            status = entry.stat(follow_symlinks=False)
                            total += status.st_blocks * 512
                            if entry.is_dir(follow_symlinks=False) and len(stack) < 512:
                                stack.append(
                                    os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                                )
                        except OSError:
                            continue  # it went away, or is not ours to see
            finally:
                os.close(fd)
            if total > stop_above:
                break
    finally:
        for fd in stack:
            os.close(fd)
    return total
