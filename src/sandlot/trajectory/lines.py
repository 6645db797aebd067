"""An append-only file of JSON lines whose unfinished last line never counts."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec


class LineWriter:
    """Appends JSON lines, each in one write, with `durable` each on disk before `append` returns.

    Safe in threads, and beside other processes that append to the same file.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self._durable = durable
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with self._alone():
            self._end()
            if durable:
                os.fsync(self._fd)

    def append(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Write a line; where it stands, and its length."""
        line = msgspec.json.encode(dict(row)) + b"\n"
        with self._alone():
            end = self._end()
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._fd, view) :]
                if self._durable:
                    os.fsync(self._fd)
            except BaseException:
                os.ftruncate(self._fd, end)
                raise
        return end, len(line)

    def _end(self) -> int:
        """Where the next line begins; what a killed writer left of one is cut off."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            size = self.path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(self._fd, size)
        return size

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else writes the file meanwhile."""
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
