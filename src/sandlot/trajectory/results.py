"""`results.jsonl`: one row per finished episode. Rows stay on disk; in memory is where each stands."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from sandlot.errors import JournalError
from sandlot.trajectory.lines import LineWriter
from sandlot.trajectory.store import write_atomically


class _Known(msgspec.Struct):
    """What of a row is asked for without reading it again."""

    episode_id: str
    group_id: str
    samples: int


class _Place(NamedTuple):
    """Offset and length of a row, its group, and whether its episode left samples."""

    at: int
    size: int
    group_id: str
    samples: bool


_known = msgspec.json.Decoder(_Known)
_row = msgspec.json.Decoder(dict[str, Any])


class Results:
    """The rows by episode id, in the order they were written. Thread-safe.

    Without `write` it shows what was there when it was opened, whatever becomes of the file.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._write = write
        self._open()

    def _open(self) -> None:
        self._lines = LineWriter(self.path, durable=True) if self._write else None
        self._places: dict[str, _Place] = {}
        if not self.path.exists():
            return
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._shut = weakref.finalize(self, os.close, self._fd)
        with open(self._fd, "rb", closefd=False) as file:
            self._find(file)

    def _find(self, file: IO[bytes]) -> None:
        """Note where the complete lines are."""
        at = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # it is being written, or its writer was killed
            try:
                self._note(_known.decode(line), at, len(line))
            except msgspec.MsgspecError as e:
                raise self._damaged(f"in line {number}", e) from e
            at += len(line)

    def _damaged(self, where: str, why: Exception) -> JournalError:
        return JournalError(
            f"{self.path} is damaged {where}: {why}; take the line out, and continuing the run makes it again from the "
            "episode's journal"
        )

    def _note(self, row: _Known, at: int, size: int) -> None:
        self._places[row.episode_id] = _Place(at, size, sys.intern(row.group_id), row.samples > 0)

    def __contains__(self, episode_id: object) -> bool:
        return episode_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._places))

    def __getitem__(self, episode_id: str) -> dict[str, Any]:
        place = self._places[episode_id]
        try:
            return _row.decode(os.pread(self._fd, place.size, place.at))
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise self._damaged(f"at byte {place.at}", e) from e

    def get(self, episode_id: str) -> dict[str, Any] | None:
        return self[episode_id] if episode_id in self._places else None

    def group(self, episode_id: str) -> str:
        return self._places[episode_id].group_id

    def has_samples(self, episode_id: str) -> bool:
        return self._places[episode_id].samples

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the row of an episode that has none yet; on disk when this returns."""
        assert self._lines is not None, "opened for reading"
        with self._lock:
            if row["episode_id"] not in self._places:
                at, size = self._lines.append(row)
                self._note(_Known(row["episode_id"], row["group_id"], row["samples"]), at, size)

    def drop(self, episode_ids: Collection[str]) -> None:
        """Take out the rows of episodes. Nobody else may write meanwhile."""
        gone = set(episode_ids)
        kept = [place for episode_id, place in self._places.items() if episode_id not in gone]

        def write(file: IO[bytes]) -> None:
            for place in kept:
                file.write(os.pread(self._fd, place.size, place.at))

        with self._lock:
            write_atomically(self.path, write)
            self._close()
            self._open()

    def close(self) -> None:
        """Nothing is written any more; what is there can still be read."""
        if self._lines is not None:
            self._lines.close()

    def _close(self) -> None:
        self.close()
        self._shut()
