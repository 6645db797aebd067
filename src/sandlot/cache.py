"""Where Sandlot keeps what it made once (models, agent layers), and the lock that lets one process make it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
