"""A damaged episode is told with its cause and its cure, and hides no other: in `audit`, `export` and `view`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sandlot.cli.app import app
from sandlot.errors import AuditError, ConfigError
from sandlot.rollout.proof import audit_run
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir
from sandlot.trajectory.store import write_samples
from support.kill_run import session


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A group of three finished episodes, the first of an id that is no file name, and one under way."""
    with RunDir.create_or_continue(tmp_path / "run", {"sampling": {"temperature": 1.0}}) as writing:
        for episode, reward in (("a/0", 1.0), ("b", 1.0), ("c", 0.0), ("d", None)):
            with writing.begin(SessionRecord(episode_id=episode, group_id="g")) as journal:
                for turn in session(0).turns:
                    journal.turn(turn)
                if reward is not None:
                    journal.append(SealedRecord(reward=reward))
            if reward is not None:
                writing.complete(episode)
    return RunDir.read(tmp_path / "run")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[RunDir], Any], str]] = {
    "first record": ("a/0", lambda r: flip(r.journal_path("a/0"), 3), r"damaged at byte 0: .*restore it .*or move"),
    "last record": ("b", lambda r: flip(r.journal_path("b"), -12), r"b\.jsonl\.gz is damaged at byte .*restore it"),
    "no journal": ("b", lambda r: r.journal_path("b").unlink(), r"b\.jsonl\.gz cannot be read \(No such .*restore it"),
    "samples": ("c", lambda r: flip(r.samples_path("c"), 40), r"c\.parquet is damaged: .*restore it"),
    "no samples": ("c", lambda r: r.samples_path("c").unlink(), r"c\.parquet cannot be read \(No such .*restore it"),
    "end of samples": ("c", lambda r: r.samples_path("c").write_bytes(b"PAR1"), r"c\.parquet is damaged: .*restore it"),
    "first under way": (
        "d",
        lambda r: flip(r.journal_path("d"), 3),
        r"d\.jsonl\.gz is damaged at byte 0: .*restore it",
    ),
    "last under way": ("d", lambda r: flip(r.journal_path("d"), -12), r"d\.jsonl\.gz is damaged at byte .*restore it"),
}
"""Name of a damage: (episode, what is done to it, what is told)."""


def sandlot(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_others_are_audited_and_exported(damage: str, run: RunDir) -> None:
    episode, harm, says = DAMAGES[damage]
    harm(run)
    others = {"a/0", "b", "c"} - {episode}
    status, told = sandlot("audit", str(run.path))
    assert status == 1
    assert (told["episodes"], told["unfinished"]) == (len(others), 0 if episode == "d" else 1)
    ((bad, text),) = ((v["episode_id"], v["text"]) for v in told["violations"])
    assert bad == episode
    assert re.search(says, text), text
    for form, name in (("jsonl", "episode_id"), ("atif", "session_id"), ("tinker", "")):
        status, told = sandlot("export", str(run.path), "--to", form)
        assert status == 0
        assert set(told["left_out"]) == {episode}
        assert told["left_out"][episode] in text
        rows = [json.loads(line) for line in Path(told["file"]).read_text().splitlines()]
        assert rows
        assert not name or {row[name] for row in rows} == others
    shown = CliRunner().invoke(app, ["view", str(run.path)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert ("unreadable" in shown.stdout) == (episode == "d")


def test_a_run_is_in_order_at_every_moment_while_it_is_written(tmp_path: Path) -> None:
    """Each episode is cut off once, its journal set aside while others look, and begun again."""

    def write() -> None:
        with RunDir.create_or_continue(tmp_path / "run", {}) as writing:
            begun.set()
            for number in range(12):
                if number == 6:
                    looked.wait(60)
                header = SessionRecord(episode_id=f"e/{number}", group_id="g")
                writing.begin(header).close()
                with writing.begin(header) as journal:
                    for turn in session(0).turns:
                        journal.turn(turn)
                    journal.append(SealedRecord(reward=1.0))
                writing.complete(header.episode_id)

    begun, looked, seen = threading.Event(), threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(write)
        begun.wait(60)
        while not done.done():
            reading = RunDir.read(tmp_path / "run")
            seen.append(audit_run(reading))
            assert len(list(reading.samples())) == seen[-1].counts["samples"]
            if seen[-1].counts["episodes"]:
                looked.set()
        done.result()
    assert [found.violations for found in seen] == [[]] * len(seen)
    assert audit_run(RunDir.read(tmp_path / "run")).counts["episodes"] == 12
    assert any(0 < found.counts["episodes"] < 12 for found in seen)


def test_what_is_lost_is_not_compared_with(run: RunDir) -> None:
    """Of three episodes with the rewards 1, 1, 0 the last is lost: what is left of the group has no signal."""
    run.journal_path("c").unlink()
    _, told = sandlot("export", str(run.path), "--to", "tinker", "--advantage", "grpo_nostd")
    rows = [json.loads(line) for line in Path(told["file"]).read_text().splitlines()]
    assert {a for row in rows for a in row["loss_fn_inputs"]["advantages"]} == {0.0}


def test_a_sample_that_can_be_read_and_is_wrong_stops_the_export(run: RunDir) -> None:
    run.journal_path("b").unlink()
    write_samples(run.samples_path("c"), run.samples_of("c")[:1])
    with pytest.raises(AuditError, match="found 1 violations; the first, in c: untrained"):
        sandlot("export", str(run.path))


def test_where_nothing_is_left_the_damage_is_told(run: RunDir) -> None:
    for episode in ("a/0", "b", "c"):
        run.journal_path(episode).unlink()
    with pytest.raises(ConfigError, match=r"no samples to export.*; 3 episodes that cannot be read; the first, a/0: "):
        sandlot("export", str(run.path))
