"""A finished run in which one thing on disk was changed, for every thing there is: the audit finds it, or it changes
neither a sample nor a result."""

from __future__ import annotations

import copy
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sandlot.errors import SandlotError
from sandlot.rollout.proof import audit_run
from sandlot.trajectory import journal as journal_module
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.result import complete_episode
from sandlot.trajectory.rundir import RunDir
from sandlot.trajectory.store import SCHEMA, to_json
from support.sessions import SessionBuilder


def session() -> SessionBuilder:
    """A fork, a sub-agent, a compaction, a generation that went on under new weights, an answer that was asked for
    again, one that nobody had, one cut by its length, and one that does not fit."""
    s = SessionBuilder()
    t0 = s.root((1, 2, 3), (4, 5), versions=(("7", 0, 1), ("8", 1, 2)), branch="main")
    s.root((90, 91), (92,), branch="subagent:a", fork="another system prompt")
    s.follow(t0, (6,), (9, 9))
    t3 = s.follow(t0, (6,), (7, 8))
    s.follow(t3, (10,), (11,), delivered=False)
    t5 = s.follow(t3, (10,), (12, 13), finish_reason="length")
    s.follow(t5, (14, 15, 16, 17), (18,))
    s.fork(t3, 3, (20,), (21,))
    s.add((1, 2, 30), (31, 32), fork="history compacted", parent=t0.id, shared=2)
    return s


@dataclass
class Place:
    """The run, and what its one finished episode came to."""

    run: Path
    good: tuple[Any, Any]

    def opened(self) -> RunDir:
        return RunDir.read(self.run)

    @property
    def journal(self) -> Path:
        return self.run / "episodes" / "e.jsonl.gz"

    @property
    def samples(self) -> Path:
        return self.run / "samples" / "e.parquet"

    @property
    def results(self) -> Path:
        return self.run / "results.jsonl"

    def passes(self) -> bool:
        """Whether the audit finds the episode, and nothing wrong with it."""
        try:
            found = audit_run(self.opened())
        except SandlotError:
            return False
        return found.violations == [] and found.counts["episodes"] == 1

    def means(self) -> tuple[Any, Any]:
        """What the journal as it is now comes to."""
        row, samples = complete_episode(read_journal(self.journal))
        return row, [to_json(sample) for sample in samples]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("mutations") / "run"
    header = SessionRecord(
        episode_id="e",
        group_id="g",
        created=1.0,
        sampling={"temperature": 1.0},
        max_tokens=11,
        metadata={"task": "t"},
        session={"engine": "x"},
    )
    with RunDir.create_or_continue(path, {}) as run, run.begin(header) as journal:
        for turn in session().turns:
            journal.turn(turn)
        journal.delivered("t5")
        journal.append(SealedRecord(reward=0.5, time=2.0, verdict={"tests": {"a": "passed"}}, metadata={"n": 1}))
        run.complete("e")
    found = Place(path, ({}, []))
    found.good = found.means()
    assert found.passes()
    samples = found.good[1]
    assert [s["status"] for s in samples].count("truncated") == 1
    assert sum("abandoned" in s["metadata"] for s in samples) == 1
    assert sum("cut" in s["metadata"] for s in samples) == 1
    return found


# --- one change at a time --------------------------------------------------------------------------------------------

Change = tuple[str, Any]
"""Where, and the whole as it is after the change."""


def changes(whole: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """`whole` with one thing in it changed, for each: a value, an entry lost, doubled or moved."""
    if isinstance(whole, dict):
        for key, value in whole.items():
            for place, other in changes(value, f"{where}.{key}"):
                yield place, {**whole, key: other}
        return
    if isinstance(whole, list):
        for k, value in enumerate(whole):
            for place, other in changes(value, where):
                yield place, [*whole[:k], other, *whole[k + 1 :]]
            yield f"{where} lost", [*whole[:k], *whole[k + 1 :]]
            yield f"{where} doubled", [*whole[: k + 1], copy.deepcopy(value), *whole[k + 1 :]]
            if k and whole[k - 1] != value:
                yield f"{where} moved", [*whole[: k - 1], value, whole[k - 1], *whole[k + 1 :]]
        return
    others: dict[type, list[Any]] = {
        bool: [not whole],
        int: [whole + 1, whole - 1] if isinstance(whole, int) else [],
        float: [whole - 0.125] if isinstance(whole, float) else [],
        str: [f"{whole}x", ""] if whole else ["x"],
        type(None): [0.5],
    }
    yield from ((where, other) for other in others[type(whole)])


def swept(place: Place, path: Path, all_of_them: Iterator[Change], write: Callable[[Any], None]) -> set[str]:
    """Write every change to `path` and see; where those were that the audit found."""
    good, found = path.read_bytes(), set()
    try:
        for where, whole in all_of_them:
            try:
                write(whole)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                continue  # no such file can be
            if not place.passes():
                found.add(where)
            elif path == place.journal:
                assert place.means() == place.good, where
            else:
                pytest.fail(f"{where} was changed and the audit finds nothing wrong")
    finally:
        path.write_bytes(good)
    assert place.passes()
    return found


def test_a_change_in_the_samples_is_found(place: Place) -> None:
    rows = pq.read_table(place.samples).to_pylist()
    for row in rows:
        row["metadata"] = json.loads(row["metadata"])

    def write(changed: list[dict[str, Any]]) -> None:
        packed = [{**row, "metadata": json.dumps(row["metadata"])} for row in changed]
        pq.write_table(pa.Table.from_pylist(packed, SCHEMA), place.samples)

    found = swept(place, place.samples, changes(rows), write)
    fields = {where.split(" ")[0].split(".")[1] for where in found if "." in where}
    assert fields == set(SCHEMA.names)
    assert {" lost", " doubled", " moved"} <= found


def test_a_change_in_the_result_is_found(place: Place) -> None:
    row = json.loads(place.results.read_text())

    def write(changed: dict[str, Any]) -> None:
        place.results.write_text(json.dumps(changed) + "\n")

    found = swept(place, place.results, changes(row), write)
    assert {where.split(".")[1].split(" ")[0] for where in found} >= set(row) - {"violations"}


def test_a_change_in_the_journal_is_found_or_changes_nothing(place: Place) -> None:
    records = [json.loads(line) for line in gzip.decompress(place.journal.read_bytes()).splitlines()]

    def write(changed: list[dict[str, Any]]) -> None:
        place.journal.write_bytes(b"".join(map(_member, changed)))

    found = swept(place, place.journal, changes(records), write)
    evidence = {"id", "parent", "shared", "new_ids", "output_ids", "logprobs", "finish_reason", "prompt_sha256"}
    evidence |= {"prompt_length", "versions", "branch", "fork", "delivered", "logprobs_mode", "sampling"}  # of turns
    evidence |= {"type", "episode_id", "group_id", "schema", "created", "max_tokens", "metadata"}  # of the session
    evidence |= {"reward", "failure", "verdict", "time"}  # of its end
    assert {where.split(" ")[0].split(".")[1] for where in found if "." in where} >= evidence
    assert {" lost", " doubled", " moved"} <= found


def _member(record: dict[str, Any]) -> bytes:
    """A record as the journal has it, whatever it says, with true checksums."""
    text = json.dumps(record).encode() + b"\n"
    packer = zlib.compressobj(*journal_module._PACKING)
    body = packer.compress(text) + packer.flush()
    body += zlib.crc32(text).to_bytes(4, "little") + len(text).to_bytes(4, "little")
    return journal_module._header(len(body)) + body
