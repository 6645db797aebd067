"""What is done to an image once so that no boot has to: users, homes, mount points, an owned work directory."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from sandlot.sandbox.jail import accounts, syscalls
from sandlot.sandbox.jail.posix import opened

_IN_ROOT = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
_DIRECTORIES = (
    *((name, 0o755) for name in ("dev", "etc", "home", "proc", "run", "sys", "var")),
    *(("tmp", 0o1777), ("var/tmp", 0o1777), ("root", 0o700), ("home/agent", 0o755)),
)


def prepare(root: Path, owner: int | None, agent_id: int) -> None:
    """Make in the image at `root` what every boot needs. `owner`: the id outside of root inside, if another."""
    with opened(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
        os.fchmod(top, stat.S_IMODE(os.fstat(top).st_mode) | 0o555)  # agents must be able to search it
        for name, mode in _DIRECTORIES:
            _make_directory(top, name, mode, owner, agent_id if name == "home/agent" else 0)
        with suppress(OSError), opened(_open_directory(top, "etc")) as etc:
            for name, agent, always in accounts.accounts(agent_id):
                if accounts.update(etc, name, agent, always) and owner is not None:
                    os.chown(name, owner, owner, dir_fd=etc, follow_symlinks=False)


def _make_directory(top: int, name: str, mode: int, owner: int | None, user: int) -> None:
    parent, _, base = name.rpartition("/")
    with suppress(OSError), opened(_open_directory(top, parent or ".")) as fd:  # a boot makes what cannot be made here
        try:
            os.mkdir(base, mode, dir_fd=fd)
        except FileExistsError:
            if not mode & 0o1000 and not user:
                return
        with opened(os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)) as made:
            if owner is not None:
                os.fchown(made, owner + user, owner + user)
            os.fchmod(made, mode)


def resolve(root: Path, path: str) -> str | None:
    """Where the directory `path` of an image really is, relative to `root`; None when absent or the root itself."""
    try:
        with (
            opened(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top,
            opened(_open_directory(top, path.lstrip("/") or ".")) as fd,
        ):
            there, base = (os.readlink(f"/proc/self/fd/{n}") for n in (fd, top))
    except OSError:
        return None
    relative = os.path.relpath(there, base)
    return None if relative == "." or relative.startswith("..") else relative


def is_foreign(path: Path, uid: int) -> bool:
    """Whether anything at or below `path` belongs to somebody else than `uid`."""
    if path.lstat().st_uid != uid:
        return True
    return any(
        os.lstat(os.path.join(directory, name)).st_uid != uid
        for directory, directories, files in os.walk(path)
        for name in (*directories, *files)
    )


def copy_owned(root: Path, relative: str, target: Path, uid: int) -> None:
    """Copy the tree `relative` of the image at `root` below `target`, owned by `uid`; its parents stay as they are."""
    parts = Path(relative).parts
    for end in range(len(parts)):
        source, made = root.joinpath(*parts[:end]), target.joinpath(*parts[:end])
        made.mkdir(exist_ok=True)
        status = source.stat()
        os.chown(made, status.st_uid, status.st_gid)
        made.chmod(stat.S_IMODE(status.st_mode))
    copy = target / relative
    shutil.copytree(root / relative, copy, symlinks=True)
    for directory, directories, files in os.walk(copy):
        for name in (".", *directories, *files):
            os.chown(os.path.join(directory, name), uid, uid, follow_symlinks=False)


def _open_directory(top: int, path: str) -> int:
    return syscalls.openat2(top, path, os.O_RDONLY | os.O_DIRECTORY, _IN_ROOT)
