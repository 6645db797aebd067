"""Samples on disk: parquet and JSON lines, whole or not at all."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sandlot.errors import ConfigError, SandlotError
from sandlot.trajectory import store
from sandlot.trajectory.sample import Sample, Span
from sandlot.trajectory.samples import linearize
from sandlot.trajectory.store import SCHEMA, read_samples, to_json, write_bytes, write_jsonl, write_samples
from support.sessions import SessionBuilder


def samples() -> list[Sample]:
    s = SessionBuilder()
    t0 = s.root((1, 2), (3, 2**31 - 1), logprobs=(-0.1, -1e-30), versions=(("v1", 0, 1), ("v2", 1, 2)))
    t1 = s.follow(t0, (4, 5), (6,))
    s.fork(t1, 3, (7,), (8,))
    return linearize(s.turns, episode_id="é/1", group_id="g", reward=0.5, metadata={"task": {"id": "x"}})


def test_columns_are_plain_for_other_readers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_samples(path, [replace(samples()[0], advantage=-0.25), replace(samples()[1], reward=None)])
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    assert table.schema.field("tokens").type == pa.list_(pa.int32())
    first, second = table.to_pylist()
    assert first["tokens"] == [1, 2, 3, 2**31 - 1, 4, 5, 6]
    assert first["weight_versions"] == [
        {"version": "", "length": 2},
        {"version": "v1", "length": 1},
        {"version": "v2", "length": 1},
        {"version": "", "length": 2},
        {"version": "v1", "length": 1},
    ]
    assert first["spans"][0] == {"start": 2, "turn_id": "t0", "offset": 0, "length": 2}
    assert json.loads(first["metadata"]) == {"task": {"id": "x"}, "turns": 2}
    assert (first["reward"], first["advantage"], second["reward"], second["advantage"]) == (0.5, -0.25, None, None)
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_directory_is_read_in_order_and_without_unfinished_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_samples(tmp_path / f"{name}.parquet", [replace(s, episode_id=name) for s in samples()])
    (tmp_path / ".c.parquet.1-1.tmp").write_bytes(b"half")
    back = list(read_samples(tmp_path))
    assert [(s.episode_id, s.index) for s in back] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert back[0].spans[0] == Span(2, "t0", 0, 2)
    assert back[0].tokens.flags.writeable
    assert next(read_samples(tmp_path / "b.parquet")).weight_versions == samples()[0].weight_versions


def test_many_samples_go_into_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ROW_GROUP_TOKENS", 10)
    path = tmp_path / "a.parquet"
    many = [replace(s, index=k) for k, s in enumerate(samples() * 5)]
    write_samples(path, iter(many))
    assert pq.ParquetFile(path).num_row_groups > 3
    back = list(read_samples(path))
    assert [s.index for s in back] == list(range(10))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(back, many, strict=True))


def test_no_samples_make_an_empty_file(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.parquet", [])
    assert list(read_samples(tmp_path)) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_samples(path, samples())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_samples(path, [replace(samples()[0], metadata={"x": float("nan")})])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_bytes_appear_whole(tmp_path: Path) -> None:
    for data in (b"diff\0", b""):
        write_bytes(tmp_path / "a.patch", data)
        assert (tmp_path / "a.patch").read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["a.patch"]


def test_what_is_no_file_stays_and_a_link_leads_to_the_new_one(tmp_path: Path) -> None:
    """`--out /dev/stdout`, say: the name would be taken from the machine."""
    target, link, pipe = tmp_path / "a.parquet", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("a.parquet")
    os.mkfifo(pipe)
    (tmp_path / "stdout").symlink_to("pipe")
    for _ in range(2):  # a link to what is not there yet, and to what is
        write_bytes(link, b"x")
        assert (link.is_symlink(), target.read_bytes()) == (True, b"x")
    for name in ("pipe", "stdout"):
        with pytest.raises(ConfigError, match=f"{name} is no file"):
            write_samples(tmp_path / name, samples())
    with pytest.raises(ConfigError, match="is no file"):
        write_bytes(tmp_path, b"")
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "link", "pipe", "stdout"]


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(SandlotError, match=r"x\.parquet holds no samples"):
        list(read_samples(tmp_path / "x.parquet"))
    (tmp_path / "y.parquet").write_bytes(b"nothing")
    with pytest.raises(SandlotError, match=r"y\.parquet is damaged: .*restore it from a copy"):
        list(read_samples(tmp_path / "y.parquet"))


def test_a_changed_byte_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_samples(path, samples())
    data, good, refused = path.read_bytes(), [to_json(s) for s in samples()], 0
    for at in range(0, len(data), 5):
        bad = bytearray(data)
        bad[at] ^= 0x80 if at % 2 else 0x01
        path.write_bytes(bad)
        try:
            assert [to_json(s) for s in read_samples(path)] == good, at
        except SandlotError:
            refused += 1
    assert refused > len(data) // 10


def test_weight_versions_of_more_tokens_than_there_are_are_not_spread_out(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_samples(path, samples())
    rows = pq.read_table(path).to_pylist()
    rows[1]["weight_versions"][0]["length"] = 2**31 - 1
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    with pytest.raises(
        SandlotError, match=r"a\.parquet is damaged: row 1 has 5 tokens and weight versions of 2147483648"
    ):
        list(read_samples(path))


def test_json_lines_hold_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, samples())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    for line, sample in zip(lines, samples(), strict=True):
        assert set(line) == {f.name for f in SCHEMA}
        assert line["tokens"] == sample.tokens.tolist()
        assert line["loss_mask"] == sample.loss_mask.tolist()
        assert np.array_equal(np.array(line["logprobs"], dtype=np.float32), sample.logprobs)
        assert sum(run["length"] for run in line["weight_versions"]) == len(sample.tokens)
        assert [tuple(span.values()) for span in line["spans"]] == list(sample.spans)
        assert line["metadata"] == sample.metadata
