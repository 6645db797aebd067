"""Samples on disk: parquet files, written whole or not at all, and JSON lines for other tools."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sandlot.errors import ConfigError, SandlotError
from sandlot.trajectory.journal import sync_directory
from sandlot.trajectory.sample import Sample, Span

_SCHEMA_VERSION = b"1"
_ROW_GROUP_TOKENS = 2_000_000

_SPAN = pa.struct([("start", pa.int32()), ("turn_id", pa.string()), ("offset", pa.int32()), ("length", pa.int32())])
_RUN = pa.struct([("version", pa.string()), ("length", pa.int32())])

SCHEMA = pa.schema(
    [
        pa.field("episode_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("branch", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("weight_versions", pa.list_(_RUN), nullable=False),
        pa.field("spans", pa.list_(_SPAN), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("loss_weight", pa.float64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ],
    metadata={b"sandlot.samples": _SCHEMA_VERSION},
)
"""One row per sample; `weight_versions` is run-length encoded, `metadata` is JSON."""


def write_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Write samples to one parquet file; at `path` there is the old file or the whole new one at any moment."""

    def write(file: IO[bytes]) -> None:
        with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
            for batch in _batches(samples):
                writer.write_batch(_to_batch(batch))

    write_atomically(path, write)


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a parquet file, or of all `*.parquet` files of a directory in the order of their names."""
    path = Path(path)
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            yield from _samples(file, opened)


def _samples(path: Path, file: IO[bytes]) -> Iterator[Sample]:
    """The samples of an open file. What a damaged one makes of itself can be any error of the reader's."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            version = (parquet.schema_arrow.metadata or {}).get(b"sandlot.samples")
            if version != _SCHEMA_VERSION:
                raise SandlotError(f"{path} holds no samples that this version of sandlot reads (schema {version!r})")
            if not parquet.schema_arrow.equals(SCHEMA):
                raise ValueError("its columns are not those of samples")
            for group in range(parquet.num_row_groups):
                yield from _from_table(parquet.read_row_group(group))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as e:
        raise SandlotError(f"{path} is damaged: {' '.join(str(e).split())}; restore it from a copy") from e


def write_jsonl(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines: the fields of `Sample`, `weight_versions` as runs, spans as objects."""

    def write(file: IO[bytes]) -> None:
        for sample in samples:
            file.write(msgspec.json.encode(to_json(sample)) + b"\n")

    write_atomically(path, write)


def to_json(sample: Sample) -> dict[str, Any]:
    """A sample as plain JSON values."""
    return {
        "episode_id": sample.episode_id,
        "group_id": sample.group_id,
        "index": sample.index,
        "branch": sample.branch,
        "tokens": sample.tokens.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "weight_versions": _runs(sample.weight_versions),
        "spans": [span._asdict() for span in sample.spans],
        "prompt_length": sample.prompt_length,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "loss_weight": sample.loss_weight,
        "status": sample.status,
        "metadata": dict(sample.metadata),
    }


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that appears at `path` whole or not at all."""

    def write(file: IO[bytes]) -> None:
        file.write(data)

    write_atomically(path, write)


def write_atomically(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Let `write` fill a file that appears at `path` only when it is complete and on disk.

    Through a symbolic link its target is replaced. `ConfigError` where there is something else than a file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{os.fspath(path)} is no file, so it cannot be replaced by one; give the name of a file")
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # not the one that nobody knows of
        raise
    sync_directory(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of files that they were writing; those of others at work stay."""
    for file in folder.glob(".*.tmp"):
        writer = file.name.split(".")[-2].partition("-")[0]
        if writer == str(os.getpid()) or not Path("/proc", writer).exists():
            file.unlink(missing_ok=True)


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples in row groups of bounded size, so that memory and 32-bit list offsets hold."""
    batch: list[Sample] = []
    tokens = 0
    for sample in samples:
        if batch and tokens + len(sample.tokens) > _ROW_GROUP_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(sample)
        tokens += len(sample.tokens)
    if batch:
        yield batch


def _runs(versions: Sequence[str]) -> list[dict[str, Any]]:
    return [{"version": version, "length": len(list(run))} for version, run in itertools.groupby(versions)]


def _to_batch(samples: Sequence[Sample]) -> pa.RecordBatch:
    columns: list[pa.Array] = []
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        if name in ("tokens", "loss_mask", "logprobs"):
            arrays = [getattr(s, name) for s in samples]
            offsets = np.cumsum([0, *(len(a) for a in arrays)], dtype=np.int32)
            columns.append(
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), kind.value_type))
            )
        elif name == "weight_versions":
            columns.append(pa.array([_runs(s.weight_versions) for s in samples], kind))
        elif name == "spans":
            columns.append(pa.array([[span._asdict() for span in s.spans] for s in samples], kind))
        elif name == "metadata":
            columns.append(pa.array([json.dumps(dict(s.metadata), allow_nan=False) for s in samples], kind))
        else:
            columns.append(pa.array([getattr(s, name) for s in samples], kind))
    return pa.record_batch(columns, schema=SCHEMA)


def _from_table(table: pa.Table) -> Iterator[Sample]:
    plain = {
        name: table.column(name).to_pylist() for name in SCHEMA.names if name not in ("tokens", "loss_mask", "logprobs")
    }
    tokens = _arrays(table, "tokens", np.int32)
    masks = _arrays(table, "loss_mask", np.uint8)
    logprobs = _arrays(table, "logprobs", np.float32)
    for row in range(table.num_rows):
        fields = {name: values[row] for name, values in plain.items()}
        told = sum(run["length"] for run in fields["weight_versions"])
        if told != len(tokens[row]):  # seen before it is spread out, which could take all memory
            raise ValueError(f"row {row} has {len(tokens[row])} tokens and weight versions of {told}")
        fields["weight_versions"] = tuple(
            itertools.chain.from_iterable([run["version"]] * run["length"] for run in fields["weight_versions"])
        )
        fields["spans"] = tuple(Span(**span) for span in fields["spans"])
        fields["metadata"] = json.loads(fields["metadata"])
        yield Sample(tokens=tokens[row], loss_mask=masks[row], logprobs=logprobs[row], **fields)


def _arrays(table: pa.Table, name: str, dtype: npt.DTypeLike) -> list[Any]:
    """The rows of a list column as numpy arrays of their own."""
    rows: list[Any] = []
    for chunk in table.column(name).chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        rows += [np.array(values[a:b], dtype=dtype) for a, b in itertools.pairwise(offsets)]
    return rows
