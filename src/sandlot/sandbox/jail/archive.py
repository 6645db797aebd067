"""Tar archives in and out of a sandbox, by our own code inside it: nothing leaves the named directory.

Every path is walked from the directory's descriptor without following a link, so neither a hostile archive nor a tree
that changes while it is read can lead anywhere else.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress

from sandlot.sandbox.jail import files, syscalls, tree
from sandlot.sandbox.jail.posix import opened

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 400
_CHUNK = 1 << 20


def unpack(path: str, source: int) -> None:
    """Unpack the tar that `source` (a file or a pipe) holds below the directory `path`, made if absent.

    Members with an absolute or parent-relative name, links out by hard link, devices, FIFOs and sparse files are
    refused; what stands in the way of a member is replaced.
    """
    os.makedirs(path, 0o755, exist_ok=True)
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    modes: dict[str, tuple[int, float]] = {}
    try:
        with (
            open(source, "rb", closefd=False) as file,
            tarfile.open(fileobj=file, mode="r|", errorlevel=2, bufsize=_CHUNK) as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # a million members must not be a million objects
                _unpack_member(root, archive, member, modes)
        for name in sorted(modes, reverse=True):
            mode, mtime = modes[name]
            with suppress(FileNotFoundError, NotADirectoryError), opened(_walk(root, _parts(name), make=False)) as fd:
                os.fchmod(fd, mode)
                os.utime(fd, (mtime, mtime))
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise OSError(errno.EINVAL, f"not a tar archive: {error}") from error
    finally:
        os.close(root)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise OSError(errno.EINVAL, f"the archive member {name!r} points out of the directory")
    if len(parts) > _MAX_DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"the archive member {name[:200]!r}… is nested too deep")
    return parts


def _walk(root: int, parts: list[str], *, make: bool) -> int:
    """The directory `parts` below `root`; what is no directory on the way is replaced when `make`."""
    fd = os.dup(root)
    for part in parts:
        try:
            try:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                os.mkdir(part, 0o755, dir_fd=fd)
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            except OSError as error:
                if not make or error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                os.unlink(part, dir_fd=fd)
                os.mkdir(part, 0o755, dir_fd=fd)
                below = os.open(part, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _unpack_member(
    root: int, archive: tarfile.TarFile, member: tarfile.TarInfo, modes: dict[str, tuple[int, float]]
) -> None:
    parts = _parts(member.name)
    mode = member.mode & 0o777
    if member.isdir():
        with opened(_walk(root, parts, make=True)):
            modes["/".join(parts)] = (mode | 0o700 if not parts else mode, member.mtime)
        return
    if not parts:
        raise OSError(errno.EINVAL, f"the archive member {member.name!r} has no name")
    if not (member.isreg() or member.issym() or member.islnk()):
        raise OSError(errno.EINVAL, f"the archive member {member.name!r} is a device or FIFO")
    if member.issparse():  # its size is a number in a header, and would be written out
        raise OSError(errno.EINVAL, f"the archive member {member.name!r} is a sparse file")
    with opened(_walk(root, parts[:-1], make=True)) as parent:
        name = parts[-1]
        link = _parts(member.linkname) if member.islnk() else []
        if link == parts:
            return
        tree.remove_at(parent, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.islnk():
            if not link:
                raise OSError(errno.EINVAL, f"the archive member {member.name!r} links to nothing")
            with opened(_walk(root, link[:-1], make=False)) as origin:
                os.link(link[-1], name, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        else:
            _write_member(parent, name, archive, member, mode)


def _write_member(parent: int, name: str, archive: tarfile.TarFile, member: tarfile.TarInfo, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(os.open(name, flags, 0o600, dir_fd=parent)) as fd:
        content = archive.extractfile(member)
        left = member.size
        while left and content is not None:
            data = content.read(min(left, _CHUNK))
            if not data:
                raise OSError(errno.EINVAL, f"the archive ends inside {member.name!r}")
            left -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
        os.utime(fd, (member.mtime, member.mtime))


def pack(path: str, target: int, exclude: frozenset[str], max_bytes: int) -> None:
    """Stream the directory `path` as a GNU tar into `target`; more than `max_bytes` of it is an error.

    Entries come in the order of their names, without owners. Other file systems mounted below are left out.
    """
    root = syscalls.openat2(syscalls.AT_FDCWD, path, os.O_RDONLY | os.O_DIRECTORY, syscalls.RESOLVE_NO_MAGICLINKS)
    written = 0
    with open(target, "wb", buffering=_CHUNK, closefd=False) as out:
        for parent, name, full, status in _entries(root, exclude):
            info = _header(parent, name, full, status)
            if info is None:
                continue
            written += 512 + (status.st_size if info.isreg() else 0)
            if written > max_bytes:
                raise OSError(errno.EFBIG, f"{path} is larger than {max_bytes} bytes")
            if not info.isreg():
                out.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
                continue
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            except FileNotFoundError:
                continue
            with opened(fd):
                info.size = files.check_regular(fd, full).st_size
                written += max(0, info.size - status.st_size)
                if written > max_bytes:
                    raise OSError(errno.EFBIG, f"{path} is larger than {max_bytes} bytes")
                out.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
                left = info.size
                while left:
                    data = os.read(fd, min(left, _CHUNK)) or bytes(min(left, _CHUNK))  # it shrank: keep the promise
                    out.write(data)
                    left -= len(data)
                out.write(bytes(-info.size % 512))
        out.write(bytes(1024))


def _entries(root: int, exclude: frozenset[str]) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """(parent fd, name, path relative to root, status) below `root`, parents first."""
    device = os.fstat(root).st_dev
    stack: list[tuple[int, str, Iterator[str]]] = [(root, "", iter(sorted(os.listdir(root))))]
    while stack:
        fd, prefix, names = stack[-1]
        name = next(names, None)
        if name is None:
            os.close(fd)
            stack.pop()
            continue
        if name in exclude:
            continue
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_dev != device:
                continue
            yield fd, name, prefix + name, status
            if stat.S_ISDIR(status.st_mode):
                if len(stack) >= _MAX_DEPTH:
                    raise OSError(errno.ENAMETOOLONG, f"{(prefix + name)[:200]}… is nested too deep")
                below = os.open(name, _DIRECTORY, dir_fd=fd)
                stack.append((below, f"{prefix}{name}/", iter(sorted(os.listdir(below)))))
        except (FileNotFoundError, NotADirectoryError):
            continue


def _header(parent: int, name: str, full: str, status: os.stat_result) -> tarfile.TarInfo | None:
    info = tarfile.TarInfo(full)
    info.mode = stat.S_IMODE(status.st_mode)
    info.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        info.name += "/"
    elif stat.S_ISLNK(status.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(name, dir_fd=parent)
    elif not stat.S_ISREG(status.st_mode):
        return None
    return info
