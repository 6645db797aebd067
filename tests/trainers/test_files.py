"""Sandlot's own files: what other tools read in them, in which order, and that memory does not grow with the run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sandlot.trainers import TRAINERS, Export
from sandlot.trajectory import store
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.store import read_samples
from support.rows import make_row

ROWS = [make_row("a", turns=[(3, 2), (2, 3)]), make_row("a", index=1, branch="side"), make_row("b", "h", reward=None)]


def test_columns_have_types_and_only_what_may_be_missing_is_nullable(tmp_path: Path) -> None:
    assert TRAINERS.get("parquet").write(tmp_path / "x.parquet", Export.of(ROWS)) == 3
    table = pq.read_table(tmp_path / "x.parquet")
    assert {field.name for field in table.schema if field.nullable} == {"reward", "advantage"}
    types = {name: table.schema.field(name).type for name in ("tokens", "loss_mask", "logprobs")}
    assert types == {
        "tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
    }
    for row in table.to_pylist():
        assert len(row["tokens"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert sum(run["length"] for run in row["weight_versions"]) == len(row["tokens"])
    assert [row["reward"] for row in table.to_pylist()] == [1.0, 1.0, None]
    again = list(read_samples(tmp_path / "x.parquet"))
    assert [s.weight_versions for s in again] == [s.weight_versions for s in ROWS]


@pytest.mark.slow
def test_datasets_reads_the_parquet_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed here")
    TRAINERS.get("parquet").write(tmp_path / "x.parquet", Export.of(ROWS))
    TRAINERS.get("sft").write(tmp_path / "x.jsonl", Export.of(ROWS))
    read = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert read.features["tokens"].feature.dtype == "int32"
    assert read.features["logprobs"].feature.dtype == "float32"
    assert read.with_format("numpy")[0]["tokens"].tolist() == ROWS[0].tokens.tolist()
    supervised = datasets.load_dataset(
        "json", data_files=str(tmp_path / "x.jsonl"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert supervised[0]["labels"] == np.where(ROWS[0].loss_mask == 1, ROWS[0].tokens, -100).tolist()


@pytest.mark.parametrize("form", ["parquet", "jsonl", "slime", "verl", "areal", "sft", "openenv"])
def test_memory_does_not_grow_with_the_run(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is in memory at a time, and as many rows of a parquet file as make a row group."""

    monkeypatch.setattr(store, "_ROW_GROUP_TOKENS", 8000)

    def peak(count: int) -> int:
        def groups() -> Iterator[list[Sample]]:
            for number in range(count):
                yield [make_row(f"e{number}", f"g{number}", turns=[(2000, 2000)])]

        tracemalloc.start()
        try:
            assert TRAINERS.get(form).write(tmp_path / "x", Export(groups)) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few = peak(3)
    assert peak(30) < few * 2
