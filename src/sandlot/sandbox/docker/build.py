"""Images built of a directory with a Dockerfile: the directory as it is, packed the same way each time."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections import deque
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.docker.sandbox import api_errors

if TYPE_CHECKING:
    import aiodocker

_MAX_BYTES = 1 << 30
_MAX_FILES = 100_000
_SECONDS = 3600.0
_LOG_LINES = 15


def pack(directory: str, file: BufferedRandom) -> str:
    """Pack the directory of a Dockerfile; the digest of all its bytes. Links stay links."""
    root = Path(directory)
    if not (root / "Dockerfile").is_file() or (root / "Dockerfile").is_symlink():
        raise SandboxUnavailableError(f"there is no Dockerfile in {directory}")
    size = 0
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for number, path in enumerate(_below(root)):
                info = _member(archive, path, path.relative_to(root).as_posix())
                size += info.size
                if size > _MAX_BYTES or number > _MAX_FILES:
                    raise SandboxUnavailableError(
                        f"{directory} has more than {_MAX_BYTES >> 20} MiB or {_MAX_FILES} files, all of which a build "
                        "sends; keep there what the image needs"
                    )
                if info.isreg():
                    with path.open("rb") as content:
                        archive.addfile(info, content)
                else:
                    archive.addfile(info)
    except OSError as error:
        raise SandboxUnavailableError(f"{directory} cannot be packed: {error}") from error
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return digest


def _member(archive: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo:
    info = archive.gettarinfo(path, name)
    if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
        raise SandboxUnavailableError(f"{path} is a device, socket or FIFO, which no image can be built of")
    info.uid = info.gid = 0
    info.mtime, info.uname, info.gname, info.mode = 0, "", "", info.mode & 0o777
    if info.islnk():  # whether a file has two names says nothing of its content
        info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
    return info


def _below(root: Path) -> list[Path]:
    found: list[Path] = []
    for directory, directories, files in os.walk(root):
        found += [Path(directory) / name for name in (*directories, *files)]
    return sorted(found)


async def build(docker: aiodocker.Docker, directory: str, context: BufferedRandom, name: str) -> None:
    """Build the image `name` of a packed directory. What the Dockerfile runs is run by the daemon."""
    log: deque[str] = deque(maxlen=_LOG_LINES)
    try:
        with api_errors():
            messages = docker.images.build(
                fileobj=context, encoding="identity", tag=name, forcerm=True, stream=True, timeout=_SECONDS
            )
            async for message in messages:
                log += [line for line in str(message.get("stream", "")).splitlines() if line.strip()]
            await docker.images.inspect(name)
    except (SandboxError, TimeoutError) as error:
        why = f"it took more than {_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
        said = "; its log ends:\n" + "\n".join(log) if log else ""
        raise SandboxUnavailableError(f"the image of {directory}/Dockerfile cannot be built: {why}{said}") from error
