"""Result rows stay on disk: what is kept of each is small, and what was seen first stays what is seen."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import JournalError
from sandlot.trajectory.results import Results


def row(k: int, **fields: Any) -> dict[str, Any]:
    return {"episode_id": f"e{k}", "group_id": f"g{k % 3}", "samples": k % 2, **fields}


def test_rows_are_found_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    writing = Results(path, write=True)
    for k in range(5):
        writing.add(row(k, text="☂" * k))
    writing.add(row(2, text="a second time"))
    for found in (writing, Results(path, write=False)):
        assert list(found) == ["e0", "e1", "e2", "e3", "e4"]
        assert [found[name] for name in found] == [row(k, text="☂" * k) for k in range(5)]
        assert [(found.group(name), found.has_samples(name)) for name in found][:2] == [("g0", False), ("g1", True)]
        assert (found.get("e9"), "e9" in found) == (None, False)


def test_a_reader_sees_what_was_there_when_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert list(Results(path, write=False)) == []
    writing = Results(path, write=True)
    for k in range(3):
        writing.add(row(k))
    reading = Results(path, write=False)
    writing.drop(["e0", "e9"])
    writing.add(row(0, again=True))
    writing.close()
    assert [reading[name] for name in reading] == [row(0), row(1), row(2)]
    assert [writing[name] for name in writing] == [row(1), row(2), row(0, again=True)]
    assert [json.loads(line)["episode_id"] for line in path.read_text().splitlines()] == ["e1", "e2", "e0"]


def test_little_of_each_row_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    many = (row(k, verdict={"tests": {f"test_{n}": "passed" for n in range(100)}}) for k in range(2000))
    path.write_text("".join(json.dumps(one) + "\n" for one in many))
    tracemalloc.start()
    found = Results(path, write=False)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(list(found)) == 2000
    assert kept < path.stat().st_size / 5


@pytest.mark.parametrize("bad", [b"nonsense", b'{"episode_id":"e7","group_id":"g"}', b'{"episode_id":7}', b"\xff"])
def test_a_damaged_line_is_named_with_its_cure(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(row(0)) + "\n")
    path.write_bytes(path.read_bytes() + bad + b"\n")
    with pytest.raises(JournalError, match=r"results\.jsonl is damaged in line 2: .*; take the line out"):
        Results(path, write=False)


def test_damage_inside_a_row_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(json.dumps(row(0, text="x")).encode().replace(b'"x"', b'"\xff"') + b"\n")
    found = Results(path, write=False)
    with pytest.raises(JournalError, match=r"results\.jsonl is damaged at byte 0: "):
        found["e0"]
