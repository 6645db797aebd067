"""The journal of one episode: an append-only file of gzip members, one JSON record each, that survives `kill -9`.

`zcat` reads it. Each member says its own compressed size in a gzip extra field, protected by a checksum, so that a
torn tail (a proper prefix of the last member) can be told from damage, which is an error.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sandlot.errors import FailureKind, JournalError
from sandlot.trajectory.records import (
    SCHEMA_VERSION,
    DeliveredRecord,
    EventRecord,
    ForkRecord,
    Record,
    SealedRecord,
    SessionRecord,
    TurnRecord,
)
from sandlot.trajectory.repeats import Sequences
from sandlot.trajectory.turn import Turn

# A gzip header (deflate, with extra field, no time) whose one subfield "SL" is: size of what follows, its CRC-32.
_FIXED = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff" + struct.pack("<H2sH", 12, b"SL", 8)
_HEADER = len(_FIXED) + 8
# Only digits are coded shorter: what else deflate does hardly shrinks numbers, and the agent waits meanwhile.
_PACKING = (1, zlib.DEFLATED, -12, 6, zlib.Z_HUFFMAN_ONLY)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


@dataclass(frozen=True)
class JournalContent:
    """Everything a journal holds. `torn` says that an unfinished last record was dropped.

    `turns` are in the order they were sampled and carry `delivered`. `header` is None only when the writer died
    before its first record was complete.
    """

    header: SessionRecord | None
    turns: list[Turn]
    delivered: frozenset[str]
    events: list[EventRecord | ForkRecord]
    sealed: SealedRecord | None
    torn: bool

    @property
    def group_id(self) -> str:
        """The group of the episode, as it was told last."""
        named = self.sealed.group_id if self.sealed else None
        return named if named is not None else self.header.group_id if self.header else ""


class JournalWriter:
    """Appends records to the journal of one episode. Thread-safe; every call blocks until the record is on disk, but
    for `delivered`, which gets there with the record after it at the latest.

    Opening an existing journal checks it, drops a torn tail and goes on; `content` is what was there. Only one
    writer can have a journal open. After a `SealedRecord` nothing can follow.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"{self.path} is being written by someone else; end that one first") from None
            data = self.path.read_bytes()
            self.content, self._order, self._end = _replay(data, self.path)
            self._sequences = Sequences(self.content.turns)
            if self.content.torn:
                os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            sync_directory(self.path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, record: Record, *, wait: bool = True) -> None:
        """Write a record and wait until it is on disk (without `wait`: until it survives the end of this process).

        A refused record or a failed write leaves the journal as is.
        """
        with self._lock:
            turn = record.turn(self._sequences) if isinstance(record, TurnRecord) else None
            self._append(record, wait=wait)
            if turn is not None:
                self._sequences.add(turn)

    def _append(self, record: Record, *, wait: bool = True) -> None:
        if self._fd < 0:
            raise JournalError(f"{self.path} is closed; nothing can be added")
        if problem := self._order.problem(record):
            raise JournalError(f"{self.path}: {problem}")
        member = _member(record)
        try:
            view = memoryview(member)
            while view:
                view = view[os.write(self._fd, view) :]
            if wait:
                os.fsync(self._fd)
        except BaseException:
            os.ftruncate(self._fd, self._end)
            raise
        self._order.note(record)
        self._end += len(member)

    def turn(self, turn: Turn) -> None:
        """Record an accepted call of the engine; call it before the last byte of the reply is sent."""
        with self._lock:
            self._append(TurnRecord.of(turn, self._sequences.repeats(turn)))
            self._sequences.add(turn)

    def delivered(self, turn_id: str) -> None:
        """Record that the whole reply of a turn reached the client."""
        self.append(DeliveredRecord(turn_id), wait=False)

    @property
    def sealed(self) -> bool:
        return self._order.sealed

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_journal(path: str | os.PathLike[str]) -> JournalContent:
    """Read a journal. A torn tail is dropped and reported; damage anywhere else raises `JournalError`."""
    path = Path(path)
    return _replay(path.read_bytes(), path)[0]


def read_header(path: str | os.PathLike[str]) -> SessionRecord | None:
    """Only the first record of a journal, None when it never became complete."""
    path = Path(path)
    with path.open("rb") as file:
        data = file.read(_HEADER)
        if len(data) == _HEADER:
            data += file.read(_body_size(data, 0, path))
    return _replay(data, path)[0].header


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Order:
    """Which record can come next."""

    def __init__(self) -> None:
        self.started = False
        self.sealed = False
        self.turns: set[str] = set()

    def problem(self, record: Record) -> str:
        """Why `record` cannot come next, or the empty string."""
        if self.sealed:
            return "the journal is sealed; nothing can follow"
        if self.started == isinstance(record, SessionRecord):
            return "a journal begins with its session record and has only one"
        match record:
            case SessionRecord() if record.schema != SCHEMA_VERSION:
                return f"it has schema {record.schema}, this version of sandlot reads {SCHEMA_VERSION}"
            case TurnRecord() if record.id in self.turns:
                return f"turn {record.id!r} is there twice"
            case TurnRecord() if record.parent is not None and record.parent not in self.turns:
                return f"turn {record.id!r} continues {record.parent!r}, which is no earlier turn"
            case DeliveredRecord() if record.turn not in self.turns:
                return f"turn {record.turn!r} was delivered but never recorded"
            case SealedRecord() if record.reward is not None and not 0.0 <= record.reward <= 1.0:
                return f"a reward must be a finite number in [0, 1], not {record.reward!r}"
            case SealedRecord() if record.failure is not None and record.failure not in set(FailureKind):
                return f"{record.failure!r} is no failure kind"
        return ""

    def note(self, record: Record) -> None:
        match record:
            case SessionRecord():
                self.started = True
            case TurnRecord():
                self.turns.add(record.id)
            case SealedRecord():
                self.sealed = True


def _replay(data: bytes, path: Path) -> tuple[JournalContent, _Order, int]:
    """What `data` holds, the state it leaves, and where its last complete record ends."""
    order, end = _Order(), 0
    header: SessionRecord | None = None
    sealed: SealedRecord | None = None
    turns: list[tuple[int, TurnRecord]] = []
    events: list[EventRecord | ForkRecord] = []
    delivered: set[str] = set()
    for record, next_at in _records(data, path):
        if problem := order.problem(record):
            raise _damaged(path, end, problem)
        order.note(record)
        match record:
            case SessionRecord():
                header = record
            case TurnRecord():
                turns.append((end, record))
            case DeliveredRecord():
                delivered.add(record.turn)
            case SealedRecord():
                sealed = record
            case _:
                events.append(record)
        end = next_at
    content = JournalContent(
        header=header,
        turns=_turns(turns, delivered, path),
        delivered=frozenset(delivered | {t.id for _, t in turns if t.delivered}),
        events=events,
        sealed=sealed,
        torn=end < len(data),
    )
    return content, order, end


def _turns(records: list[tuple[int, TurnRecord]], delivered: set[str], path: Path) -> list[Turn]:
    """The turns of records, each with the offset where it stands."""
    turns, earlier = [], Sequences()
    for at, record in records:
        try:
            turn = record.turn(earlier, delivered=record.id in delivered)
        except JournalError as e:
            raise _damaged(path, at, e) from e
        earlier.add(turn)
        turns.append(turn)
    return turns


def _damaged(path: Path, at: int, why: object) -> JournalError:
    return JournalError(f"{path} is damaged at byte {at}: {why}; restore it from a copy or move it away")


def _member(record: Record) -> bytes:
    """A record as one gzip member."""
    text = _encoder.encode(record) + b"\n"
    packer = zlib.compressobj(*_PACKING)
    body = packer.compress(text) + packer.flush() + struct.pack("<II", zlib.crc32(text), len(text) & 0xFFFFFFFF)
    return _header(len(body)) + body


def _header(size: int) -> bytes:
    packed = struct.pack("<I", size)
    return _FIXED + packed + struct.pack("<I", zlib.crc32(packed))


def _body_size(data: bytes, at: int, path: Path) -> int:
    """Size of what follows the member header at `at`, which is complete."""
    head = data[at : at + _HEADER]
    (size,) = struct.unpack_from("<I", head, len(_FIXED))
    if head != _header(size):
        raise _damaged(path, at, "no record begins here")
    return int(size)


def _records(data: bytes, path: Path) -> Iterator[tuple[Record, int]]:
    """The complete records of a journal, each with the offset where it ends; stops before a torn tail."""
    at = 0
    while at < len(data):
        rest = len(data) - at
        if rest < _HEADER:
            known = min(rest, len(_FIXED))
            if data[at : at + known] != _FIXED[:known]:
                raise _damaged(path, at, "no record begins here")
            return
        size = _body_size(data, at, path)
        if rest < _HEADER + size:
            return
        start, end = at + _HEADER, at + _HEADER + size
        try:
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
            text = unpacker.decompress(data[start:end])
            crc, length = struct.unpack("<II", unpacker.unused_data)
            if not unpacker.eof or crc != zlib.crc32(text) or length != len(text) & 0xFFFFFFFF:
                raise ValueError("checksum differs")
            record = _decoder.decode(text)
        except (zlib.error, struct.error, ValueError, msgspec.MsgspecError) as e:
            raise _damaged(path, at, e) from e
        yield record, end
        at = end
