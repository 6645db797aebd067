"""Archives on their way to and from a remote sandbox: checked before they go in, rewritten when they come out."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterator
from typing import IO

from sandlot.errors import SandboxError

_CHUNK = 1 << 18
_MAX_DEPTH = 400


def checked(data: bytes, uid: int) -> tuple[bytes, bytes]:
    """(an archive of what `data` leaves when it is unpacked, the list of what must not stand in its way).

    Refuses names that point out, devices, FIFOs, and hard links to anything but an earlier file of the archive. What a
    later member replaces is left out and hard links are files, so that no tool has to get such things right.
    """
    left: dict[str, tarfile.TarInfo] = {}
    out = io.BytesIO()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errorlevel=2) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # a million members must not be a million objects
                if member.isreg() and member.offset_data + member.size > len(data):
                    raise tarfile.ReadError(f"it ends inside {member.name!r}")
                _put(left, member)
            if not left and data.strip(b"\0"):
                raise tarfile.ReadError("there is no member in it")
            names = sorted(left, key=lambda name: name.split("/"))
            with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as target:
                for name in names:
                    info = left[name]
                    content = archive.extractfile(info) if info.isreg() else None
                    target.addfile(_clean(name, info, uid), content)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise SandboxError(f"not a tar archive: {error}", retryable=False) from error
    listing = "".join(f"{'d' if left[name].isdir() else 'f'}{_listed(name)}\n" for name in names)
    return out.getvalue(), listing.encode("utf-8", "surrogateescape")


def _listed(name: str) -> str:
    """A name on one line of the listing: after a blank as it is, after a `%` as `printf %b` takes it."""
    if "\n" not in name:
        return f" {name}"
    return "%" + name.replace("\\", "\\0134").replace("\n", "\\0012")


def _put(left: dict[str, tarfile.TarInfo], member: tarfile.TarInfo) -> None:
    """Unpack one member into `left`, by name."""
    parts = _parts(member.name)
    for end in range(1, len(parts)):
        parent = "/".join(parts[:end])
        if parent not in left or not left[parent].isdir():
            left[parent] = _directory(parent)
    name = "/".join(parts)
    if member.isdir():
        if name and (name not in left or not left[name].isdir()):
            left[name] = member
        elif name:
            left[name].mode, left[name].mtime = member.mode, member.mtime
        return
    if not name or not (member.isreg() or member.issym() or member.islnk()):
        raise SandboxError(f"the archive member {member.name!r} is a device or FIFO, or has no name", retryable=False)
    if member.islnk():
        source = left.get("/".join(_parts(member.linkname)))
        if source is None or not source.isreg():
            raise SandboxError(f"the hard link {member.name!r} leads to no earlier file", retryable=False)
        member = source
    if (before := left.pop(name, None)) is not None and before.isdir():
        for below in [other for other in left if other.startswith(f"{name}/")]:
            del left[below]
    left[name] = member


def _clean(name: str, member: tarfile.TarInfo, uid: int) -> tarfile.TarInfo:
    clean = _directory(name) if member.isdir() else tarfile.TarInfo(name)
    clean.mode, clean.mtime, clean.uid, clean.gid = member.mode & 0o777, member.mtime, uid, uid
    if member.issym():
        clean.type, clean.linkname = tarfile.SYMTYPE, member.linkname
    elif member.isreg():
        clean.size = member.size
    return clean


def _directory(name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(f"{name}/")
    made.type, made.mode = tarfile.DIRTYPE, 0o755
    return made


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise SandboxError(f"the archive member {name!r} points out of the directory", retryable=False)
    if len(parts) > _MAX_DEPTH:
        raise SandboxError(f"the archive member {name[:200]!r}… is nested too deep", retryable=False)
    return parts


def rewritten(spool: IO[bytes], exclude: frozenset[str], mounts: tuple[str, ...], max_bytes: int) -> Iterator[bytes]:
    """A tar that a tool made, as the contract wants it: members in the order of their names.

    Hard links become files, anything but files, directories and links is left out, and so are `mounts`.
    """
    found: dict[str, tarfile.TarInfo] = {}
    try:
        with tarfile.open(fileobj=spool, mode="r:", errors="surrogateescape") as archive:
            for member in archive:
                name = _below(member.name)
                if name and not exclude.intersection(name.split("/")):
                    found[name] = member
            written = 0
            for name in sorted(found, key=lambda name: name.split("/")):
                member = found[name]
                if any(name == mount or name.startswith(f"{mount}/") for mount in mounts):
                    continue
                content = archive.extractfile(member) if member.isreg() or member.islnk() else None
                info = _plain(name, member, content)
                if info is None:
                    continue
                written += 512 + info.size
                if written > max_bytes:
                    raise SandboxError(f"the directory is larger than {max_bytes} bytes", retryable=False)
                yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
                left = info.size
                while left and content is not None:
                    data = content.read(min(left, _CHUNK))
                    if not data:
                        raise tarfile.ReadError("it ends too early")
                    left -= len(data)
                    yield data
                yield bytes(-info.size % 512)
            yield bytes(1024)
    except (tarfile.TarError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise SandboxError(f"the sandbox sent a damaged archive: {error}") from error


def _plain(name: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> tarfile.TarInfo | None:
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = member.mode & 0o7777, int(member.mtime)
    if member.isdir():
        info.type = tarfile.DIRTYPE
        info.name += "/"
    elif member.issym():
        info.type, info.linkname = tarfile.SYMTYPE, member.linkname
    elif content is not None:
        info.size = content.seek(0, os.SEEK_END)
        content.seek(0)
    else:
        return None
    return info


def _below(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise OSError(errno.EINVAL, f"the member {name!r} points out of its archive")
    return "/".join(parts)
