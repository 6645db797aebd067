"""Sandlot's own files: parquet (which `datasets`, pandas and DuckDB read) and JSON lines, every field as it is."""

from __future__ import annotations

from pathlib import Path

from sandlot.trainers.base import Counted, Export, Exporter, group_rows
from sandlot.trajectory.store import to_json, write_jsonl, write_samples


class _Whole(Exporter):
    """Writes samples themselves, so that nothing is lost on the way."""

    def write(self, path: Path, export: Export) -> int:
        samples = Counted(sample for group in export.groups() for sample in group)
        (write_samples if self.suffix == "parquet" else write_jsonl)(path, samples)
        return samples.count


_rows = group_rows(lambda group: map(to_json, group))

PARQUET = _Whole("every field of the samples, one parquet file", _rows, suffix="parquet", as_is=True)
JSONL = _Whole("every field of the samples, JSON lines", _rows, as_is=True)
