"""What the commands have in common: where they write, how they refuse, and what a terminal is spared."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sandlot.cache import cache_dir
from sandlot.cli.app import COMMANDS, GROUPS, app, told_of
from sandlot.cli.common import counted
from sandlot.cli.doctor import _cache
from sandlot.config import RunConfig, load_config
from sandlot.errors import ConfigError, FailureKind
from sandlot.rollout.outcome import EpisodeResult
from sandlot.rollout.progress import summary_table
from sandlot.tasks import load_tasks
from sandlot.terminal import literal, visible
from sandlot.trajectory.records import EventRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir


def sandlot(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sandlot.cli", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_one_thing_is_told_as_one() -> None:
    told = [counted(count, "episode") for count in (0, 1, 2, 1234)]
    assert told == ["0 episodes", "1 episode", "2 episodes", "1,234 episodes"]
    assert [counted(count, "sandbox", "sandboxes") for count in (1, 2)] == ["1 sandbox", "2 sandboxes"]


# -- where things are written ----------------------------------------------------------------------------------------


def test_what_was_asked_for_is_on_stdout_and_remarks_are_on_stderr() -> None:
    shown = CliRunner().invoke(app, ["tasks", "show", "page-count"])
    (task,) = (task for task in load_tasks("bundled") if task.id == "page-count")
    assert shown.stdout.rstrip("\n") == task.statement.rstrip("\n")
    assert shown.stderr == ""
    listed = CliRunner().invoke(app, ["tasks", "list"])
    assert "page-count" in listed.stdout


def test_json_is_heard_at_once_from_a_command_that_goes_on() -> None:
    code = "import time; from sandlot.cli.common import print_json; print_json({'ready': True}); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = "".join(process.stdout.readline() for _ in range(3))
        finally:
            process.kill()
    assert json.loads(said) == {"ready": True}


def test_a_locale_that_cannot_write_all_of_it_is_no_error() -> None:
    (task,) = (task for task in load_tasks("bundled") if not task.statement.isascii())
    for flags in ([], ["--json"]):
        argv = [sys.executable, "-m", "sandlot.cli", "tasks", "show", task.id, *flags]
        done = subprocess.run(argv, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["statement"] == task.statement


@pytest.mark.parametrize("name", [*COMMANDS, *GROUPS])
def test_help_offers_nothing_that_only_some_commands_have(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert "completion" not in shown.stdout


@pytest.mark.parametrize("name", ["engine", "engine_kind", "sandbox", "attempts"])
def test_help_tells_what_holds_where_a_setting_is_not_given(name: str) -> None:
    shown = CliRunner().invoke(app, ["rollout", "--help"], env={"COLUMNS": "200"})
    (line,) = (line for line in shown.stdout.splitlines() if f"--{name.replace('_', '-')} " in line)
    assert f"[default: ({RunConfig.model_fields[name].default})]" in line


# -- refusals --------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_as_it_is_written() -> None:
    """Square brackets and colons of a cure are no markup, and what somebody else named does not steer the terminal."""
    done = sandlot("tasks", "list", "rows[docker]:x:\x1b]0;title\x07")
    assert done.returncode == 1
    assert done.stderr.startswith("error: rows[docker]:x:␛]0;title␇: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["rows.jsonl/below.jsonl", "directory.jsonl"])
def test_what_the_system_refuses_is_one_sentence(what: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "directory.jsonl").mkdir()
    done = sandlot("tasks", "convert", "bundled", str(tmp_path / what))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/"), done.stderr
    assert "give another path" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check = _cache()
    assert not check.ok
    assert "XDG_CACHE_HOME" in check.cure
    with pytest.raises(OSError) as refused:
        (cache_dir() / "layers").mkdir(parents=True)
    assert "XDG_CACHE_HOME" in told_of(refused.value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(tmp_path / "sandlot") in _cache().detail


def test_a_task_that_is_not_there_is_told_by_every_command_alike(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("")
    for argv in (["check", "bundled"], ["grade", "bundled", "--patch", str(tmp_path / "p")]):
        argv = (["tasks", *argv] if argv[0] == "check" else argv) + ["--only", "nope"]
        refused = CliRunner().invoke(app, argv).exception
        assert isinstance(refused, ConfigError), argv
        assert "no task called 'nope'" in str(refused)


def test_an_unknown_setting_is_told_with_those_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text, says in (
        ("attemts = 3", r"no setting 'attemts'; there are: tasks, .*attempts"),
        ("[sampling]\ntemprature = 1", r"no setting 'sampling\.temprature'; there are: temperature, top_p"),
        ("[sampling]\ntop_p = 2", r"setting 'sampling\.top_p': .*less than"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_config(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no valid TOML"):
        load_config(file)


# -- text of others --------------------------------------------------------------------------------------------------


def test_text_of_others_cannot_steer_the_terminal() -> None:
    hostile = "a\x1b[2J\x9b31mb\x08\r\n[red]c[/]\t:smile:\\\x7f"
    assert visible(hostile) == "a␛[2J\ufffd31mb␈\n[red]c[/]\t:smile:\\␡"
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True, color_system=None, emoji=False).print(literal(hostile))
    assert out.getvalue().expandtabs() == (visible(hostile) + "\n").expandtabs()


# -- tables and runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [79, 104, 200])
def test_the_summary_loses_columns_before_it_loses_digits(width: int) -> None:
    result = EpisodeResult(
        "e", "duration-text", "claude-code", 0.0, FailureKind.BUDGET, turns=1234, sampled_tokens=12_345, samples=1
    )
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(summary_table([result] * 9, console))
    lines = out.getvalue().splitlines()
    for word in ("duration-text", "claude-code", "11,106", "111,105"):
        assert any(word in line for line in lines), word
    assert "…" not in out.getvalue()
    assert ("seconds" in lines[0]) == (width > 79)
    assert max(map(len, lines)) <= width


def test_view_lists_the_episodes_that_are_under_way(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path / "run", {"tasks": "bundled"}) as run:
        run.begin(SessionRecord(episode_id="cut--pi--0", group_id="cut")).close()
        shown = CliRunner().invoke(app, ["view", str(tmp_path / "run")])
    assert "unfinished  cut--pi--0" in shown.stdout


def test_view_tells_what_happened_beside_the_turns(tmp_path: Path) -> None:
    with RunDir.create_or_continue(tmp_path / "run", {"tasks": "bundled"}) as run:
        journal = run.begin(SessionRecord(episode_id="cut--pi--0", group_id="cut"))
        journal.append(EventRecord(kind="context_overflow", facts={"prompt_tokens": 9000, "limit": 8192}))
        journal.append(EventRecord(kind="late"))
        journal.close()
        shown = CliRunner().invoke(app, ["view", str(tmp_path / "run"), "cut--pi--0"])
    assert "event context_overflow: prompt tokens 9000, limit 8192\nevent late\n" in shown.stdout


def test_a_run_in_which_nothing_began_takes_another_configuration(tmp_path: Path) -> None:
    for engine in ("http://typo", "http://right"):
        with RunDir.create_or_continue(tmp_path, {"engine": engine}) as run:
            assert run.config == {"engine": engine}
    with RunDir.create_or_continue(tmp_path, {"engine": "http://right"}) as run:
        run.begin(SessionRecord(episode_id="e", group_id="g")).close()
    assert RunDir.read(tmp_path).config == {"engine": "http://right"}
    with pytest.raises(ConfigError, match="another configuration"):
        RunDir.create_or_continue(tmp_path, {"engine": "http://other"})


# -- what the system allows --------------------------------------------------------------------------------------------


def test_a_rollout_may_open_as_many_files_as_its_user_may(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each episode has a dozen open; shells begin with a bound of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    async def rollout(*_: object, **__: object) -> list[EpisodeResult]:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return []

    monkeypatch.setattr("sandlot.rollout.run.rollout", rollout)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
        CliRunner().invoke(
            app, ["rollout", "bundled", "--engine", "scripted", "--out", str(tmp_path / "run"), "--json"]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [hard]
