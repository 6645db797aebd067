"""The journal: durable, readable by zcat, whole up to the last complete record, damage told from a torn tail."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sandlot.errors import JournalError
from sandlot.trajectory import journal as journal_module
from sandlot.trajectory.journal import JournalWriter, read_header, read_journal
from sandlot.trajectory.records import (
    DeliveredRecord,
    EventRecord,
    ForkRecord,
    Record,
    SealedRecord,
    SessionRecord,
    TurnRecord,
)
from support.sessions import long_chain, make_turn

HEADER = SessionRecord(episode_id="e", group_id="g", created=1.0, sampling={"temperature": 1.0}, session={"task": "x"})
TURNS = [
    make_turn("t0", (1, 2, 2**31 - 1), (3, 0)),
    make_turn("t1", (1, 2, 2**31 - 1, 3, 0, 4), (5,), parent="t0", shared=5, delivered=False),
]
RECORDS: list[Record] = [
    HEADER,
    TurnRecord.of(TURNS[0]),
    ForkRecord(turn="t1", reason="tools changed", facts={"at": 3}),
    TurnRecord.of(TURNS[1]),
    DeliveredRecord("t1"),
    EventRecord(kind="engine_error", time=2.0, facts={"text": "gone ☂"}),
    SealedRecord(reward=0.5, verdict={"tests": {"a": "passed"}}, time=3.0),
]


def written(path: Path, records: list[Record]) -> list[int]:
    """A journal with these records; where each begins, and the end."""
    ends = [0]
    with JournalWriter(path) as journal:
        for record in records:
            journal.append(record)
            ends.append(path.stat().st_size)
    return ends


def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl.gz"
    written(path, RECORDS)
    content = read_journal(path)
    assert content.header == HEADER == read_header(path)
    assert [t.id for t in content.turns] == ["t0", "t1"]
    assert content.delivered == {"t0", "t1"}
    assert all(t.delivered for t in content.turns)
    assert content.events == [RECORDS[2], RECORDS[5]]
    assert content.sealed == RECORDS[6]
    assert not content.torn
    assert content.turns[0].new_ids.tolist() == [1, 2, 2**31 - 1]


def test_any_gzip_reader_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl.gz"
    written(path, RECORDS)
    by_python = gzip.decompress(path.read_bytes())
    assert subprocess.run(["gzip", "-dc", path], check=True, capture_output=True).stdout == by_python
    lines = [json.loads(line) for line in by_python.splitlines()]
    assert [line["type"] for line in lines] == ["session", "turn", "fork", "turn", "delivered", "event", "sealed"]
    assert lines[1]["new_ids"] == [1, 2, 2**31 - 1]
    assert lines[3]["new_ids"] == [4], "the prompt is stored as a delta"


@pytest.mark.parametrize("value", [-0.0, -5e-324, -1 / 3, -2.2250738585072014e-308, -9998.999999999998, -1e-17])
def test_logprobs_come_back_to_the_last_bit(tmp_path: Path, value: float) -> None:
    path = tmp_path / "e.jsonl.gz"
    written(path, [HEADER, TurnRecord.of(make_turn("t0", (1,), (2,), logprobs=(value,)))])
    assert read_journal(path).turns[0].logprobs.tobytes() == np.float64(value).tobytes()


def test_cut_at_any_byte_nothing_before_the_last_complete_record_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed writer can leave: any prefix of the file. It goes on from there."""
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: None)  # a kill needs none, and disks are slow
    whole = tmp_path / "whole.jsonl.gz"
    ends = written(whole, RECORDS)
    data = whole.read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        complete = sum(end <= size for end in ends) - 1
        content = read_journal(path)
        assert content.torn == (size not in ends)
        assert (content.header is not None) == (complete >= 1)
        assert len(content.turns) == sum(isinstance(r, TurnRecord) for r in RECORDS[:complete])
        assert (content.sealed is not None) == (complete == len(RECORDS))
        assert path.read_bytes() == data[:size], "reading changes nothing"
        with JournalWriter(path) as journal:
            assert journal.content.torn == content.torn
            assert path.stat().st_size == ends[complete]
            for record in RECORDS[complete:]:
                journal.append(record)
        assert path.read_bytes() == data


def _unpacks_to(data: bytes, text: bytes) -> bool:
    try:
        return gzip.decompress(data) == text
    except (OSError, EOFError, zlib.error):
        return False


def test_a_changed_byte_anywhere_is_an_error_that_names_the_offset(tmp_path: Path) -> None:
    """Never taken for a torn tail, also not in the last record: that would lose what was promised to be on disk."""
    whole = tmp_path / "whole.jsonl.gz"
    ends = written(whole, RECORDS)
    data = bytearray(whole.read_bytes())
    path = tmp_path / "bad.jsonl.gz"
    text, unnoticed = gzip.decompress(data), 0
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            bad = data.copy()
            bad[at] ^= flip
            path.write_bytes(bad)
            start = max(end for end in ends if end <= at)
            if at + 9 in ends and _unpacks_to(bad, text):  # the last byte of a deflate stream has idle bits
                unnoticed += 1
                assert read_journal(path).sealed == RECORDS[-1]
                continue
            with pytest.raises(JournalError, match=rf"bad\.jsonl\.gz is damaged at byte {start}: "):
                read_journal(path)
    assert unnoticed <= len(RECORDS)
    with pytest.raises(JournalError, match="damaged"):
        JournalWriter(path)
    assert path.read_bytes() == bad, "a damaged journal is left as it is"


@pytest.mark.parametrize(
    "tail", [b"\n", b"\0" * 40, b'{"type":"turn"}\n', b"\x1f\x8b\x08\x00", gzip.compress(b"{}\n", mtime=0)]
)
def test_strange_bytes_after_the_last_record_are_damage(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "e.jsonl.gz"
    ends = written(path, RECORDS[:2])
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(JournalError, match=f"damaged at byte {ends[-1]}"):
        read_journal(path)


def test_a_record_lost_from_the_middle_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl.gz"
    ends = written(path, RECORDS)
    data = path.read_bytes()
    path.write_bytes(data[: ends[1]] + data[ends[2] :])
    with pytest.raises(JournalError, match="'t0', which is no earlier turn"):
        read_journal(path)


@pytest.mark.parametrize(
    ("before", "record", "says"),
    [
        ([], TurnRecord.of(TURNS[0]), "begins with its session record"),
        ([HEADER], HEADER, "has only one"),
        ([], SessionRecord(episode_id="e", group_id="g", schema=99), "schema 99"),
        (RECORDS[:2], TurnRecord.of(TURNS[0]), "there twice"),
        ([HEADER], TurnRecord.of(TURNS[1]), "no earlier turn"),
        ([HEADER], DeliveredRecord("t0"), "never recorded"),
        (RECORDS, EventRecord(kind="late"), "sealed"),
        (RECORDS, SealedRecord(reward=1.0), "sealed"),
        ([HEADER], SealedRecord(reward=1.5), "finite number in"),
        ([HEADER], SealedRecord(reward=float("nan")), "finite number in"),
        ([HEADER], SealedRecord(failure="bad luck"), "no failure kind"),
    ],
)
def test_a_record_that_cannot_come_next_is_refused(
    tmp_path: Path, before: list[Record], record: Record, says: str
) -> None:
    path = tmp_path / "e.jsonl.gz"
    written(path, before)
    data = path.read_bytes()
    with JournalWriter(path) as journal, pytest.raises(JournalError, match=says):
        journal.append(record)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "turn",
    [
        replace(TURNS[0], finish_reason="abort"),
        replace(TURNS[0], finish_reason=""),
        replace(TURNS[0], output_ids=TURNS[0].output_ids[:0], logprobs=TURNS[0].logprobs[:0]),
        replace(TURNS[0], logprobs=TURNS[0].logprobs[:1]),
        replace(TURNS[0], logprobs=np.array([-1.0, np.nan])),
        replace(TURNS[0], logprobs=np.array([-1.0, -np.inf])),
    ],
)
def test_what_was_not_really_sampled_is_not_recorded(tmp_path: Path, turn) -> None:
    """h03, d04: an aborted generation, an empty one, or one without its logprobs leaves the session as it was."""
    path = tmp_path / "e.jsonl.gz"
    written(path, [HEADER])
    with JournalWriter(path) as journal:
        with pytest.raises(JournalError, match="not recorded"):
            journal.turn(turn)
        journal.turn(TURNS[0])
    assert [t.id for t in read_journal(path).turns] == ["t0"]


def test_only_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl.gz"
    with JournalWriter(path), pytest.raises(JournalError, match="being written"):
        JournalWriter(path)
    JournalWriter(path).close()


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "e.jsonl.gz")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(HEADER)


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.jsonl.gz"
    written(path, [HEADER])
    real = os.write
    with JournalWriter(path) as journal:

        def full(fd: int, data: memoryview) -> int:
            if len(data) > 20:
                return real(fd, data[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(
            journal_module.os, "write", lambda fd, data: full(fd, data[:21]) if len(data) > 60 else full(fd, data[:10])
        )
        with pytest.raises(OSError, match="No space left"):
            journal.turn(TURNS[0])
        monkeypatch.undo()
        assert not read_journal(path).torn
        journal.turn(TURNS[0])
    assert [t.id for t in read_journal(path).turns] == ["t0"]


def test_a_write_cut_short_by_the_system_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: real(fd, data[:7]))
    path = tmp_path / "e.jsonl.gz"
    written(path, RECORDS)
    monkeypatch.undo()
    assert read_journal(path).sealed is not None


def test_many_threads_append_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl.gz"
    with JournalWriter(path) as journal:
        journal.append(HEADER)

        def work(name: str) -> None:
            for k in range(20):
                journal.turn(make_turn(f"{name}{k}", range(50), range(10)))
                journal.delivered(f"{name}{k}")

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    content = read_journal(path)
    assert len(content.turns) == len(content.delivered) == 80


def test_every_record_is_on_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: (calls.append("write"), real_write(fd, data))[1])
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: (calls.append("fsync"), real_sync(fd))[1])
    with JournalWriter(tmp_path / "e.jsonl.gz") as journal:
        assert calls == ["fsync", "fsync"], "the file and its directory"
        calls.clear()
        journal.append(HEADER)
        journal.turn(TURNS[0])
    assert calls == ["write", "fsync"] * 2


def test_size_grows_with_the_new_tokens(tmp_path: Path) -> None:
    sizes = []
    for turns in (50, 100, 200):
        path = tmp_path / f"{turns}.jsonl.gz"
        with JournalWriter(path) as journal:
            journal.append(HEADER)
            for turn in long_chain(turns, new=400, output=200, head=400).turns:
                journal.turn(turn)
        sizes.append(path.stat().st_size)
    assert sizes[1] < 2.2 * sizes[0]
    assert sizes[2] < 2.2 * sizes[1]


def test_killed_writers_lose_nothing_they_said_was_on_disk(tmp_path: Path) -> None:
    """SIGKILL at random moments, each time going on with the same journal."""
    path = tmp_path / "e.jsonl.gz"
    tests = Path(__file__).parents[1]
    promised = -1
    delays = random.Random(3)
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, tests / "support" / "append_turns.py", path],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(tests)},
            text=True,
        )
        assert process.stdout is not None
        promised = int(process.stdout.readline())
        time.sleep(delays.random() / 10)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines(keepends=True)
        process.wait()
        process.stdout.close()
        promised = max([promised, *(int(line) for line in rest if line.endswith("\n"))])
        content = read_journal(path)
        assert [t.id for t in content.turns] == [f"t{k}" for k in range(len(content.turns))]
        assert len(content.turns) >= promised + 1
    assert promised > 5
