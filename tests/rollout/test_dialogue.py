"""What was said in an episode, from its journal: in Python, in the terminal, as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandlot.chat.format import load_chat_format
from sandlot.cli.app import app
from sandlot.errors import ConfigError
from sandlot.rollout.dialogue import dialogue
from sandlot.rollout.format import recorded_format
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir
from support.talk import RESULT, talk
from support.toy_model import make_toy_model


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    model, path = make_toy_model(tmp_path / "model"), tmp_path / "run"
    with RunDir.create_or_continue(path, {"model": str(model), "chat": {"thinking": "keep"}}) as run:
        with run.begin(SessionRecord(episode_id="a", group_id="g", metadata={"task": "t"})) as journal:
            for turn in talk(load_chat_format(model)).turns:
                journal.turn(turn)
            journal.append(SealedRecord(reward=1.0))
        run.complete("a")
    return path


def test_turns_are_told_as_messages(run_dir: Path) -> None:
    run = RunDir.read(run_dir)
    fmt = recorded_format(run.config)
    assert fmt is not None
    first, second, side, anew = dialogue(read_journal(run.journal_path("a")).turns, fmt)
    assert [(m.role, m.text) for m in first.heard or ()][1:] == [("user", "List files.")]
    assert [(name, call.name) for name, call in first.calls.items()] == [("t0_0", "bash"), ("t0_1", "bash")]
    assert [m.text for m in second.heard or ()] == [RESULT, "bash: no", "Go on."]
    assert [m.text for m in side.heard or ()] == ["Give it a title."]
    assert anew.heard is None
    assert "Thanks." in anew.shown


def test_view_shows_what_was_said(run_dir: Path) -> None:
    shown = CliRunner().invoke(app, ["view", str(run_dir), "a", "--texts"], catch_exceptions=False)
    assert shown.exit_code == 0
    for text in ("List files.", "Looking.", '{"command": "ls"}', "a.py", "Go on.", "history edited", "Bye."):
        assert text in shown.output
    told = CliRunner().invoke(app, ["view", str(run_dir), "a", "--texts", "--json"], catch_exceptions=False)
    turns = json.loads(told.stdout)["turns"]
    assert [m["role"] for m in turns[1]["heard"]] == ["tool", "tool", "user"]
    assert turns[1]["heard"][0]["text"] == RESULT
    assert (turns[3]["heard"], turns[3]["said"]["text"]) == (None, "Bye.")


def test_texts_need_the_model(run_dir: Path) -> None:
    (run_dir.parent / "model").rename(run_dir.parent / "elsewhere")
    with pytest.raises(ConfigError, match="read with its tokenizer"):
        CliRunner().invoke(app, ["view", str(run_dir), "a", "--texts"], catch_exceptions=False)
