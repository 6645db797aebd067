"""Where rows lie: JSONL, JSON and Parquet files, and directories that the `datasets` library saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sandlot.errors import TaskError

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")

Numbered = tuple[int, Mapping[str, Any] | TaskError]
"""A row's number in its file, from 1, and the row, or why it cannot be read."""


def is_dataset(path: Path) -> bool:
    """Whether `path` is a directory that `datasets` saved, or one of Parquet files."""
    if not path.is_dir():
        return False
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json")) or bool(_pieces(path))


def read_rows(path: Path) -> Iterator[tuple[Path, Numbered]]:
    """Every row below `path` with the file it stands in; files are read in the order of their names."""
    if path.is_dir():
        pieces = _splits(path)
        if not pieces:
            raise TaskError(f"{path}: holds no .arrow and no .parquet file")
        for piece in pieces:
            yield from read_rows(piece)
        return
    match path.suffix:
        case ".json":
            rows = _json(path)
        case ".parquet":
            rows = _parquet(path)
        case ".arrow":
            rows = _arrow(path)
        case _:
            rows = _jsonl(path)
    for row in rows:
        yield path, row


def _pieces(path: Path) -> list[Path]:
    """The files of rows in a directory, or (as the hub lays data sets out) in its `data`."""
    for place in (path, path / "data"):
        if found := sorted([*place.glob("*.arrow"), *place.glob("*.parquet")]):
            return found
    return []


def _splits(path: Path) -> list[Path]:
    """The files of a saved dataset: of all splits, in the order in which it names them."""
    if (path / "dataset_dict.json").is_file():
        names = _named(path / "dataset_dict.json", "splits", lambda split: split)
        return [piece for name in names for piece in _splits(path / name)]
    if (path / "state.json").is_file():
        return [path / name for name in _named(path / "state.json", "_data_files", lambda file: file["filename"])]
    return _pieces(path)


def _named(path: Path, key: str, name: Callable[[Any], Any]) -> list[str]:
    """The names of what lies beside a file of `datasets`' own."""
    try:
        names = [name(item) for item in json.loads(path.read_bytes())[key]]
        if bad := [n for n in names if not isinstance(n, str) or n in ("", "..") or Path(n).name != n]:
            raise ValueError(f"{bad[0]!r} is no name")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TaskError(f"{path}: {key}: names nothing that lies beside it: {error}") from None
    return names


def _jsonl(path: Path) -> Iterator[Numbered]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _row(path, number, line)
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from None


def _row(path: Path, number: int, line: bytes) -> Mapping[str, Any] | TaskError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return TaskError(f"{path}: row {number}: not readable as JSON: {error}")
    return row if isinstance(row, dict) else TaskError(f"{path}: row {number}: must be an object")


def _json(path: Path) -> Iterator[Numbered]:
    """A list of objects, or an object whose one list is the rows."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not readable as JSON: {error}") from None
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and all(isinstance(row, dict) for row in v)]
        value = lists[0] if len(lists) == 1 else [value]
    if not isinstance(value, list):
        raise TaskError(f"{path}: must be a list of objects")
    for number, row in enumerate(value, 1):
        yield number, row if isinstance(row, dict) else TaskError(f"{path}: row {number}: must be an object")


def _parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _batches(file.iter_batches(batch_size=64))
    except (pa.ArrowException, OSError) as error:
        raise TaskError(f"{path}: not readable as Parquet: {error}") from None


def _arrow(path: Path) -> Iterator[Numbered]:
    """What `datasets` writes: the stream format, or the file format."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                file = pa.ipc.open_file(source)
                reader = (file.get_batch(index) for index in range(file.num_record_batches))
            yield from _batches(reader)
    except (pa.ArrowException, OSError) as error:
        raise TaskError(f"{path}: not readable as Arrow: {error}") from None


def _batches(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row
