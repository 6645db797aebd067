"""Flattening layers into one directory, by our own code: whatever an archive says, nothing outside is touched.

Every path is resolved by the kernel as if the target were the root directory, so links in parents lead where they
would lead inside, and nowhere else. Files are made new and never opened for writing where they stand.
"""

from __future__ import annotations

import errno
import lzma
import os
import stat
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from sandlot.errors import SandboxError
from sandlot.sandbox.jail import syscalls, tree
from sandlot.sandbox.jail.posix import opened

_CHUNK = 1 << 20
_MAX_EXTENDED_HEADER = 1 << 20
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_IN_ROOT = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
_MAX_ID = 65535
_MAX_DEPTH = 256
BAD_ARCHIVE = (tarfile.TarError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError)
"""What reading a damaged archive may raise, besides `OSError`."""


class _Member(tarfile.TarInfo):
    """A member whose extended headers are bounded, since tarfile reads them whole into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _EXTENDED and member.size > _MAX_EXTENDED_HEADER):
            raise tarfile.ReadError(f"a header claims {member.size} bytes")
        return member


class Unpacker:
    """Unpacks layers, lowest first, into the directory `root`.

    Owners become `owner` + their id, or stay the caller when `owner` is None. Devices, FIFOs, extended attributes and
    set-id bits of files are left out: no sandbox would honour them.
    """

    def __init__(self, root: Path, owner: int | None, *, max_bytes: int, max_entries: int = 4_000_000) -> None:
        self.bytes = 0
        self.entries = 0
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._owner, self._max_bytes, self._max_entries = owner, max_bytes, max_entries
        self._directories: dict[str, tuple[int, int, float]] = {}
        """(inode, mode, mtime) to be set when nothing is written any more."""
        self._added: set[str] = set()

    def apply(self, layer: IO[bytes], name: str) -> None:
        """Unpack one uncompressed layer over what is there; `name` is for errors."""
        self._added.clear()
        try:
            with tarfile.open(fileobj=layer, mode="r|", tarinfo=_Member, errorlevel=2) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # a million members must not be objects
                    self._count(member, name)
                    self._member(archive, member)
        except BAD_ARCHIVE as error:
            raise SandboxError(f"{name} is damaged or no tar archive: {error}", retryable=False) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SandboxError(f"no space is left to unpack {name}; free some in the cache directory") from error
            raise SandboxError(f"{name} cannot be unpacked: {error}", retryable=False) from error

    def finish(self) -> None:
        """Set modes and times of directories, and close."""
        try:
            for path in sorted(self._directories, reverse=True):
                inode, mode, mtime = self._directories[path]
                with suppress(OSError), opened(self._directory(path.split("/") if path else [])) as fd:
                    if os.fstat(fd).st_ino == inode:
                        os.utime(fd, (mtime, mtime))
                        # Whoever unpacked must get in again, to boot from the files.
                        os.fchmod(fd, mode | 0o500 if self._owner is None or not path else mode)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the directory."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _count(self, member: tarfile.TarInfo, name: str) -> None:
        if member.size < 0:
            raise tarfile.ReadError(f"{member.name!r} claims {member.size} bytes")
        self.entries += 1
        self.bytes += 512 + member.size if member.isreg() else 512
        if self.bytes > self._max_bytes:
            raise SandboxError(f"{name} is larger than {self._max_bytes:,} bytes unpacked", retryable=False)
        if self.entries > self._max_entries:
            raise SandboxError(f"{name} has more than {self._max_entries:,} entries", retryable=False)

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = split(member.name)
        if not parts:
            if member.isdir():
                self._remember("", self._root, member)
            return
        base = parts[-1]
        if base == ".wh..wh..opq":
            self._remove_lower_entries(parts[:-1])
            return
        if base.startswith(".wh."):
            if not base.startswith(".wh..wh.") and base[4:] not in ("", ".", ".."):
                self._remove_lower([*parts[:-1], base[4:]])
            return
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return
        with opened(self._directory(parts[:-1], make=True)) as parent:
            if member.isdir():
                self._make_directory(parent, parts, member)
            elif member.islnk():
                self._link(parent, base, member)
            else:
                tree.remove_at(parent, base)
                if member.issym():
                    os.symlink(member.linkname, base, dir_fd=parent)
                    self._own(parent, base, member)
                    os.utime(base, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
                else:
                    self._write(parent, base, archive, member)
        for end in range(len(parts), 0, -1):
            if (path := "/".join(parts[:end])) in self._added:
                break
            self._added.add(path)

    def _directory(self, parts: list[str], *, make: bool = False) -> int:
        """The directory `parts`, resolved inside; what is missing or no directory on the way is made when `make`."""
        try:
            return syscalls.openat2(self._root, "/".join(parts) or ".", os.O_RDONLY | os.O_DIRECTORY, _IN_ROOT)
        except OSError as error:
            if not make or not parts or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
        with opened(self._directory(parts[:-1], make=True)) as parent:
            tree.remove_at(parent, parts[-1])  # a link to nothing, or a file where a directory must be
            os.mkdir(parts[-1], 0o755, dir_fd=parent)
            if self._owner is not None:
                os.chown(parts[-1], self._owner, self._owner, dir_fd=parent, follow_symlinks=False)
            return os.open(parts[-1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)

    def _make_directory(self, parent: int, parts: list[str], member: tarfile.TarInfo) -> None:
        name = parts[-1]
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                tree.remove_at(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)
        self._own(parent, name, member)
        with opened(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as fd:
            self._remember("/".join(parts), fd, member)

    def _remember(self, path: str, fd: int, member: tarfile.TarInfo) -> None:
        self._directories[path] = (os.fstat(fd).st_ino, member.mode & 0o3777, member.mtime)

    def _link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        target = split(member.linkname)
        if not target:
            raise OSError(errno.EINVAL, f"the hard link {member.name!r} leads nowhere")
        with opened(self._directory(target[:-1])) as source:
            there = os.stat(target[-1], dir_fd=source, follow_symlinks=False)
            if not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
                raise OSError(errno.EINVAL, f"the hard link {member.name!r} leads to no file")
            with suppress(FileNotFoundError):
                here = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                    return
            tree.remove_at(parent, name)
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def _write(self, parent: int, name: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        content = archive.extractfile(member)
        with opened(os.open(name, flags, 0o600, dir_fd=parent)) as fd:
            left = member.size
            while left and content is not None:
                data = content.read(min(left, _CHUNK))
                if not data:
                    raise tarfile.ReadError(f"it ends inside {member.name!r}")
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            self._own(parent, name, member)
            os.fchmod(fd, member.mode & 0o777)
            os.utime(fd, (member.mtime, member.mtime))

    def _own(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        if self._owner is not None:
            uid, gid = (self._owner + (i if 0 <= i <= _MAX_ID else 65534) for i in (member.uid, member.gid))
            os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)

    def _remove_lower(self, parts: list[str]) -> None:
        """Remove what lower layers have at `parts`; what this layer added stays, wherever its whiteout stands."""
        if "/".join(parts) in self._added:
            with suppress(NotADirectoryError):
                self._remove_lower_entries(parts)
            return
        with suppress(FileNotFoundError, NotADirectoryError), opened(self._directory(parts[:-1])) as parent:
            tree.remove_at(parent, parts[-1])

    def _remove_lower_entries(self, parts: list[str]) -> None:
        """Remove what lower layers have below the directory `parts`."""
        stack = [parts]
        while stack:
            path = stack.pop()
            try:
                fd = self._directory(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with opened(fd):
                for name in os.listdir(fd):
                    if "/".join([*path, name]) not in self._added:
                        tree.remove_at(fd, name)
                    elif stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        stack.append([*path, name])


def split(name: str) -> list[str]:
    """The parts of a member's name. A leading slash means the root of the image; `..` is refused."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise OSError(errno.EINVAL, f"the member {name[:200]!r} points out of the image")
    if len(parts) > _MAX_DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"the member {name[:200]!r} is nested too deep")
    return parts
