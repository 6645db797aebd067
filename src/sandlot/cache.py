"""Where Sandlot keeps what it made once (models, layers, images, workspaces), and how processes share it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sandlot`, or `~/.cache/sandlot`. It is not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "sandlot"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (a file of its own, made if absent), waiting for whoever holds it.

    The kernel frees it when the holder dies, so a killed process leaves no stale lock. It excludes threads of one
    process as well, and it blocks: from a coroutine use it inside `asyncio.to_thread`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class Kept:
    """A directory of a `Shelf` that is in use: it stays until `release`, or until this object is gone."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.release = weakref.finalize(self, os.close, fd)


class Shelf:
    """Directories by key below `directory`: made once, shared by all processes, and kept within `max_bytes`.

    Of those that nobody uses the longest unused go first. `remove` removes a tree.
    """

    def __init__(self, directory: Path, *, max_bytes: int, remove: Callable[[str], object] = shutil.rmtree) -> None:
        self._directory, self._max_bytes, self._remove = directory, max_bytes, remove

    def get(self, key: str, make: Callable[[Path], object]) -> Kept:
        """The directory of `key`, filled by `make` if it is not there. Blocks while another process makes it."""
        final = self._directory / key
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A shared lock on this file says that the directory is used, an exclusive one that it is removed. Its content
        # is the size, its time the last use.
        use = os.open(self._use(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        made = False
        try:
            fcntl.flock(use, fcntl.LOCK_SH)
            if not final.is_dir():
                with locked(self._directory / f"{key}.making"):
                    if not final.is_dir():
                        with self.scratch() as building:
                            make(building)
                            os.ftruncate(use, 0)
                            os.pwrite(use, str(_size(building)).encode(), 0)
                            building.rename(final)
                        made = True
            os.utime(use)
        except BaseException:
            os.close(use)
            raise
        kept = Kept(final, use)
        if made:
            self._evict()
        return kept

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new directory beside the others. It is removed at the end, and once its maker is dead."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = self._directory / f"building-{os.getpid()}-{secrets.token_hex(4)}"
        with locked(Path(f"{place}.building")):
            try:
                place.mkdir()
                yield place
            finally:
                if place.exists():
                    self._remove(str(place))
                Path(f"{place}.building").unlink(missing_ok=True)

    def _evict(self) -> None:
        # Trees are removed when the lock is given back, since others wait for it.
        with ExitStack() as doomed, locked(self._directory / ".evict.lock"):
            for stale in self._directory.glob("building-*.building"):
                doomed.callback(self._clear, stale)
            keys = [use.stem for use in self._directory.glob("*.use") if use.with_suffix("").is_dir()]
            sizes = {key: self._size_of(key) for key in keys}
            total = sum(sizes.values())
            for key in sorted(keys, key=lambda key: self._use(key).stat().st_mtime):
                if total <= self._max_bytes:
                    return
                with self._free(self._use(key)) as free:
                    if free:  # and gone at once for whoever comes now
                        (self._directory / key).rename(doomed.enter_context(self.scratch()) / "doomed")
                        total -= sizes[key]

    def _clear(self, stale: Path) -> None:
        """Remove a directory that its maker left behind when it died, by the file that the maker had locked."""
        with self._free(stale) as free:
            if free:
                with suppress(FileNotFoundError):
                    self._remove(str(stale).removesuffix(".building"))
                stale.unlink(missing_ok=True)

    def _use(self, key: str) -> Path:
        return self._directory / f"{key}.use"

    def _size_of(self, key: str) -> int:
        return int(self._use(key).read_text() or _size(self._directory / key))

    @staticmethod
    @contextmanager
    def _free(path: Path) -> Iterator[bool]:
        """Whether nobody locks the file `path`; nobody can until the end."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)


def _size(place: Path) -> int:
    """Bytes of disk that a directory takes."""
    total = 0
    for parent, directories, files in os.walk(place):
        for name in (*directories, *files):
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
