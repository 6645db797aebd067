"""The run directory: continued after a kill at any place, nothing lost, nothing doubled."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import ConfigError, JournalError
from sandlot.trajectory.audit import audit
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import EpisodeState, RunDir, safe_name
from sandlot.trajectory.store import read_samples, write_samples
from sandlot.trajectory.turn import Turn
from support.kill_run import session, workload
from support.sessions import make_turn

CONFIG = {"seed": 7, "model": "m", "sampling": {"temperature": 1.0, "top_p": 1.0}, "harnesses": ["pi"]}
TESTS = Path(__file__).parents[1]


def header(episode: str, **fields: Any) -> SessionRecord:
    return SessionRecord(episode_id=episode, group_id="g", **fields)


def play(run: RunDir, episode: str, turns: list[Turn], seal: SealedRecord | None = None, **fields: Any) -> None:
    with run.begin(header(episode, **fields)) as journal:
        for turn in turns:
            journal.turn(turn)
        if seal:
            journal.append(seal)


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path / "run", CONFIG, facts={"sandlot": "0.1"}) as run:
        play(run, "a", session(0).turns, SealedRecord(reward=1.0, metadata={"patch": 3}), metadata={"task": "x"})
        assert run.state("a") is EpisodeState.SEALED
        row = run.complete("a")
        assert run.complete("a") == row
        run.metrics({"loss": 1.5})
        assert run.state("a") is EpisodeState.FINISHED
        assert run.state("b") is EpisodeState.ABSENT
    assert row["episode_id"] == "a"
    assert (row["reward"], row["failure"], row["violations"]) == (1.0, None, [])
    assert (row["turns"], row["samples"], row["forks"], row["sampled_tokens"], row["trained_tokens"]) == (3, 2, 1, 4, 4)
    assert row["metadata"] == {"task": "x", "patch": 3}
    read = RunDir.read(tmp_path / "run")
    assert list(read.results()) == [row]
    assert read.result("a") == row
    assert read.config == CONFIG
    assert read.facts == {"sandlot": "0.1"}
    assert read.episode_ids() == ["a"]
    assert [s.metadata["task"] for s in read.samples()] == ["x", "x"]
    assert read.audit("a").ok
    with pytest.raises(ConfigError, match="reading only"):
        read.complete("a")
    with pytest.raises(ConfigError, match="reading only"):
        read.begin(header("b"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text().endswith('"loss":1.5}\n')
    assert tomllib.loads((tmp_path / "run" / "run.toml").read_text())["config"] == CONFIG
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"episodes", "samples", "patches", "logs", "run.toml"}


@pytest.mark.parametrize("by", ["kill", "full"])
def test_cut_off_anywhere_the_same_command_ends_the_run(tmp_path: Path, by: str) -> None:
    """SIGKILL before each write, fsync, rename, truncation, and in the middle of each write; or a disk that is full at
    some size of a file; then once more."""
    reference = tmp_path / "reference"
    workload(reference)
    done = subprocess.run(
        [sys.executable, TESTS / "support" / "kill_run.py", tmp_path / "cut", *([by] if by == "full" else [])],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    places = int(done.stdout)
    assert places > 30
    wanted = list(RunDir.read(reference).results())
    runs = sorted((tmp_path / "cut").iterdir())
    assert len(runs) >= (2 * places if by == "kill" else places)
    aside = 0
    for path in runs:
        run = RunDir.read(path)
        assert [_timeless(row) for row in run.results()] == [_timeless(row) for row in wanted], path.name
        assert len((path / "results.jsonl").read_bytes().splitlines()) == 2
        assert [(s.episode_id, s.index) for s in read_samples(path / "samples")] == [
            (f"task/{k}", n) for k in range(2) for n in range(2)
        ]
        for k in range(2):
            run.audit(f"task/{k}").raise_for_violations()
            assert len(read_journal(run.journal_path(f"task/{k}")).turns) == 3
        assert not list(path.rglob("*.tmp"))
        aside += len(list(path.glob("episodes/*.aborted.jsonl.gz")))
    assert aside > 5, "episodes cut off in the middle began again, their journals were kept"


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in ("created", "finished")}


def test_a_sealed_journal_without_a_result_is_completed_and_not_redone(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(reward=1.0))
        play(run, "b", session(1).turns)
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        assert [row["episode_id"] for row in run.recover()] == ["a"]
        assert run.recover() == []
        assert run.state("b") is EpisodeState.UNSEALED
        with pytest.raises(JournalError, match="is over"):
            run.begin(header("a"))
        assert run.audit("b").ok, "an unsealed session has no samples and needs none"


def test_stale_samples_of_a_killed_process_do_not_count(tmp_path: Path) -> None:
    """Killed between the samples and the result line: the file is there, the episode is not finished."""
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(reward=1.0))
        play(run, "b", session(1).turns, SealedRecord(reward=0.0))
        run.complete("b")
        write_samples(run.samples_path("a"), run.samples())
        assert {s.episode_id for s in run.samples()} == {"b"}
        run.recover()
        assert [s.episode_id for s in run.samples()] == ["a", "a", "b", "b"]  # however they came to an end
        assert [s.reward for s in read_samples(tmp_path / "samples")] == [1.0, 1.0, 0.0, 0.0]


def test_an_attempt_that_was_cut_off_is_set_aside_and_numbered(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        for _ in range(3):
            play(run, "a", session(0).turns[:2])
        play(run, "a", session(0).turns, SealedRecord(reward=1.0))
        run.complete("a")
        assert sorted(p.name for p in (tmp_path / "episodes").iterdir()) == [
            "a.1.aborted.jsonl.gz",
            "a.2.aborted.jsonl.gz",
            "a.3.aborted.jsonl.gz",
            "a.jsonl.gz",
        ]
        assert run.episode_ids() == ["a"]


def test_only_what_the_dead_left_half_written_is_removed(tmp_path: Path) -> None:
    """An export into the run's directory goes on while the run is continued."""
    RunDir.create_or_continue(tmp_path, CONFIG).close()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        for pid in (other.pid, os.getpid(), dead.pid):
            (tmp_path / f".export.jsonl.{pid}-1.tmp").touch()
            (tmp_path / "samples" / f".a.parquet.{pid}-1.tmp").touch()
        RunDir.create_or_continue(tmp_path, CONFIG).close()
        left = {p.name for p in tmp_path.rglob("*.tmp")}
        assert left == {f".export.jsonl.{other.pid}-1.tmp", f".a.parquet.{other.pid}-1.tmp"}


def test_an_attempt_set_aside_alone_is_no_episode(tmp_path: Path) -> None:
    """Killed between setting the old journal aside and making the new one."""
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns[:2])
        run.journal_path("a").rename(tmp_path / "episodes" / "a.1.aborted.jsonl.gz")
        assert run.episode_ids() == []
        assert run.state("a") is EpisodeState.ABSENT


def test_a_journal_that_is_set_aside_while_one_looks_is_no_episode(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns)
        (tmp_path / "episodes" / "b.jsonl.gz").symlink_to("gone")  # listed, and not there when it is opened
        assert RunDir.read(tmp_path).episode_ids() == ["a"]
        assert run.state("b") is EpisodeState.ABSENT


def test_an_episode_whose_first_record_is_damaged_goes_by_its_file(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a/0", session(0).turns)
        play(run, "b", session(0).turns, SealedRecord(reward=1.0))
        run.journal_path("a/0").write_bytes(b"\0" + run.journal_path("a/0").read_bytes())
        name = safe_name("a/0")
        assert run.episode_ids() == [name, "b"]
        with pytest.raises(JournalError, match=rf"{name}\.jsonl\.gz is damaged at byte 0: .*restore it from a copy"):
            run.state(name)
        with pytest.raises(JournalError, match=rf"{name}\.jsonl\.gz is damaged"):
            run.recover()
        assert [row["episode_id"] for row in run.results()] == ["b"]


def test_a_damaged_journal_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        for episode in "abc":
            play(run, episode, session(0).turns, SealedRecord(reward=1.0))
        data = bytearray(run.journal_path("a").read_bytes())
        data[-12] ^= 0xFF
        run.journal_path("a").write_bytes(data)
        with pytest.raises(JournalError, match=r"a\.jsonl\.gz is damaged at byte \d+.*move it away"):
            run.recover()
        assert [row["episode_id"] for row in run.results()] == ["b", "c"]
        run.journal_path("a").unlink()
        assert run.recover() == []


@pytest.mark.parametrize("failure", ["aborted", "infra_error"])
def test_an_episode_that_broke_has_a_row_and_no_sample(tmp_path: Path, failure: str) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(failure=failure))
        row = run.complete("a")
        assert (row["samples"], row["trained_tokens"], row["reward"], row["failure"]) == (0, 0, None, failure)
        assert list(run.samples()) == []
        assert not run.samples_path("a").exists()
        assert run.audit("a").ok


def test_an_ungraded_episode_has_samples_without_a_reward(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(failure="grader_error"))
        assert run.complete("a")["reward"] is None
        assert [s.reward for s in run.samples()] == [None, None]
        assert run.audit("a").ok


def test_a_session_without_turns_has_a_row_and_no_sample(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", [], SealedRecord(reward=0.0))
        row = run.complete("a")
        assert (row["samples"], row["turns"], row["reward"]) == (0, 0, 0.0)


def test_samples_that_fail_the_audit_are_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    """A turn whose prompt hash does not fit its delta, and one whose logprob is none."""
    bad_prompt = make_turn("t0", (1, 2), (3,))
    object.__setattr__(bad_prompt, "prompt_sha256", "0" * 64)
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", [bad_prompt], SealedRecord(reward=1.0))
        play(run, "b", [make_turn("t0", (1, 2), (3,), logprobs=(0.5,))], SealedRecord(reward=1.0))
        play(run, "c", session(0).turns, SealedRecord(reward=1.0))
        a, b, c = run.recover()
        for row in (a, b):
            assert (row["failure"], row["reward"], row["samples"]) == ("infra_error", None, 0)
        assert "SHA-256 differs" in a["violations"][0]
        assert "turn_logprobs" in b["violations"][0]
        assert (c["failure"], c["violations"]) == (None, [])
        assert {s.episode_id for s in run.samples()} == {"c"}


def test_tampered_samples_are_found_by_the_audit_of_the_run(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(reward=1.0))
        run.complete("a")
        first, second = run.samples()
        for samples in ([first], [first, first], [], [second, first]):
            write_samples(run.samples_path("a"), samples)
            assert not run.audit("a").ok
        write_samples(run.samples_path("a"), [])
        assert {v.kind for v in run.audit("a").violations} == {"untrained"}
        run.samples_path("a").unlink()
        with pytest.raises(FileNotFoundError):
            run.audit("a")


def test_samples_that_are_gone_are_made_again(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        for name in ("a", "b", "c"):
            play(run, name, session(0).turns, SealedRecord(reward=1.0))
            run.complete(name)
        before = run.samples_path("a").read_bytes()
        for name in ("a", "b"):
            run.samples_path(name).unlink()
        run.journal_path("b").unlink()
        run.journal_path("c").write_bytes(b"")  # nobody asks, as long as its samples are there
        assert run.recover() == []
        assert run.samples_path("a").read_bytes() == before
        assert not run.samples_path("b").exists()
        assert run.audit("a").ok


def test_too_long_samples_are_cut_the_same_way_after_a_restart(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(reward=1.0), max_tokens=6)
        row = run.complete("a")
        samples = list(run.samples())
        assert (row["cut"], [len(s.tokens) for s in samples], samples[0].status) == (1, [5, 5], "truncated")
        assert run.audit("a").ok
        assert not audit(session(0).turns, samples).ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 8}, "seed was 7, is 8"),
        ({"model": None}, "model was 'm', is not set"),
        ({"extra": True}, "extra was not set, is True"),
        ({"sampling": {"temperature": 0.5, "top_p": 1.0}}, "sampling.temperature was 1.0, is 0.5"),
        ({"harnesses": ["pi", "claude-code"]}, r"harnesses was \['pi'\], is \['pi', 'claude-code'\]"),
        ({"seed": 7.0}, "seed was 7, is 7.0"),
    ],
)
def test_a_run_with_another_configuration_is_not_continued(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        run.begin(header("a")).close()
    with pytest.raises(ConfigError, match=f"another configuration \\({says}\\)"):
        RunDir.create_or_continue(tmp_path, {**CONFIG, **change})
    RunDir.create_or_continue(tmp_path, CONFIG).close()


def test_what_results_do_not_depend_on_may_change(tmp_path: Path) -> None:
    config = {**CONFIG, "limits": {"at_once": 4, "ports": (1, 2)}, "note": None, "where": Path("x")}
    with RunDir.create_or_continue(tmp_path, config) as run:
        run.begin(header("a")).close()
    RunDir.create_or_continue(tmp_path, config).close()
    config["limits"] = {"at_once": 8}
    with pytest.raises(ConfigError, match=r"limits\.at_once was 4, is 8"):
        RunDir.create_or_continue(tmp_path, config)
    RunDir.create_or_continue(tmp_path, config, may_differ=["limits"]).close()


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with (
        RunDir.create_or_continue(tmp_path, CONFIG),
        pytest.raises(ConfigError, match=f"being written by process {os.getpid()}"),
    ):
        RunDir.create_or_continue(tmp_path, CONFIG)
    with RunDir.create_or_continue(tmp_path, CONFIG):
        assert list(RunDir.read(tmp_path).results()) == []


def test_other_directories_and_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty and no run"):
        RunDir.create_or_continue(tmp_path, CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.txt"]
    with pytest.raises(ConfigError, match="no run directory"):
        RunDir.read(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.a\[0\]\.b is .*, which run\.toml cannot hold"):
        RunDir.create_or_continue(tmp_path / "new", {"a": [{"b": object()}]})
    RunDir.create_or_continue(tmp_path / "run", CONFIG).close()
    (tmp_path / "run" / "run.toml").write_text("schema = 1\n[config")
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read"):
        RunDir.create_or_continue(tmp_path / "run", CONFIG)


def test_a_damaged_result_line_is_named_and_a_torn_one_dropped(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(reward=1.0))
        run.complete("a")
    lines = tmp_path / "results.jsonl"
    whole = lines.read_bytes()
    for cut in (1, 20, len(whole) - 1):
        lines.write_bytes(whole[:cut])
        with RunDir.create_or_continue(tmp_path, CONFIG) as run:
            assert run.state("a") is EpisodeState.SEALED
            run.recover()
        assert lines.read_bytes() == whole
    lines.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(JournalError, match=r"results\.jsonl is damaged in line 1"):
        RunDir.create_or_continue(tmp_path, CONFIG)


def test_episodes_that_begin_again_were_never_there(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        for name in ("a", "b", "c"):
            play(run, name, session(0).turns, SealedRecord(reward=1.0))
            run.complete(name)
        run.begin_again(["b"])
        assert (run.state("b"), [row["episode_id"] for row in run.results()]) == (EpisodeState.ABSENT, ["a", "c"])
        assert run.recover() == []
        play(run, "b", session(0).turns, SealedRecord(reward=0.0))
        run.complete("b")
    for found in (run, RunDir.read(tmp_path)):
        assert {row["episode_id"]: row["reward"] for row in found.results()} == {"a": 1.0, "c": 1.0, "b": 0.0}
        assert found.audit("b").ok
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "episodes" / "b.1.aborted.jsonl.gz").exists()


def test_killed_while_episodes_begin_again_the_run_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        play(run, "a", session(0).turns, SealedRecord(failure="infra_error"))
        run.complete("a")
        monkeypatch.setattr(RunDir, "_set_aside", lambda self, episode_id: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.begin_again(["a"])
        monkeypatch.undo()
    with RunDir.create_or_continue(tmp_path, CONFIG) as run:
        assert run.state("a") is EpisodeState.SEALED
        assert [row["failure"] for row in run.recover()] == ["infra_error"]
        run.begin_again(["a"])
        assert run.state("a") is EpisodeState.ABSENT


def test_file_names_are_safe_and_one_per_episode() -> None:
    odd = ["a/b", "a_b", "../x", "..", ".hidden", "", "a" * 300, "é", "a b", "a.1.aborted", "a.1.ABORTED", "con\0"]
    names = [safe_name(i) for i in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        assert "/" not in name
        assert "\0" not in name
        assert name[0] not in ".-"
        assert len(name) < 150
        assert not name.lower().endswith(".aborted")
    assert safe_name("django__django-11099.pi.0") == "django__django-11099.pi.0"
    assert safe_name("a/b").startswith("a_b-")


@pytest.mark.parametrize("episode", ["task/0 é", "../../x", "a.1.aborted"])
def test_episodes_with_odd_ids_are_found_again(tmp_path: Path, episode: str) -> None:
    with RunDir.create_or_continue(tmp_path / "r", CONFIG) as run:
        play(run, episode, session(0).turns, SealedRecord(reward=1.0))
        assert run.episode_ids() == [episode]
        assert run.recover()[0]["episode_id"] == episode
        assert {s.episode_id for s in run.samples()} == {episode}
        for path in (run.patch_path(episode), run.log_path(episode, "agent")):
            assert path.resolve().parent.parent == (tmp_path / "r").resolve()
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_processes_that_join_a_run_write_beside_each_other(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path / "run", CONFIG) as run:
        assert run.lock is not None
        first, second = (RunDir.join(run.path, os.dup(run.lock)) for _ in range(2))
        for joined, name in ((first, "a"), (second, "b"), (first, "c")):
            play(joined, name, session(0).turns, SealedRecord(reward=1.0))
            joined.complete(name)
            with (run.path / "results.jsonl").open("ab") as file:
                file.write(b'{"episode_id": "half of a li')  # whoever is killed at it must not spoil the next line
        with pytest.raises(JournalError, match="is over"):
            second.begin(header("a"))
    with pytest.raises(ConfigError, match="is being written"):
        RunDir.create_or_continue(tmp_path / "run", CONFIG)
    first.close()
    second.close()
    with RunDir.create_or_continue(tmp_path / "run", CONFIG) as run:
        assert [row["episode_id"] for row in run.results()] == ["a", "b", "c"]
