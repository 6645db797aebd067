"""Real clients' recorded conversations through continuity: one branch per conversation, and a reason for each fork."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from support.captures import captured, load_capture
from support.replay import Step, replay, shape_of
from support.scenarios import SCENARIOS


def steps_of(cli: str, scenario: str) -> list[Step]:
    return replay(load_capture(cli)[scenario])


@pytest.mark.parametrize(("cli", "scenario"), SCENARIOS)
def test_every_request_goes_on_from_the_turn_it_really_follows(cli: str, scenario: str) -> None:
    expected = SCENARIOS[cli, scenario].continues
    steps = steps_of(cli, scenario)
    assert [s.match.turn for s in steps] == [None if turn is None else f"t{turn}" for turn in expected]
    shape = shape_of(steps)
    answered = [i for i, step in enumerate(steps) if step.answered]
    assert shape.conversations == sum(expected[i] is None for i in answered)
    assert shape.branches == sum(i not in {expected[j] for j in answered} for i in answered)


@pytest.mark.parametrize(("cli", "scenario"), SCENARIOS)
def test_exactly_the_forks_have_a_reason(cli: str, scenario: str) -> None:
    """The first request of a session, and one that goes on from a turn that nothing else went on from, is no fork."""
    used: set[str | None] = set()
    for number, step in enumerate(steps_of(cli, scenario)):
        match = step.match
        plain = match.turn is not None and match.turn not in used
        first = number == 0 or not any(s.answered for s in steps_of(cli, scenario)[:number])
        assert bool(match.fork) == (not plain and not first), (number, match.fork)
        if step.answered:
            used.add(match.turn)


@pytest.mark.parametrize(("cli", "scenario"), SCENARIOS)
def test_what_follows_a_turn_is_new(cli: str, scenario: str) -> None:
    """After a continued turn stand only messages that the gateway has not answered: results and the user's words."""
    for step in steps_of(cli, scenario):
        if step.match.turn is None:
            continue
        assert step.match.new
        assert len(step.match.new) < len(step.request.messages)
        if not step.match.fork:
            assert all(m.role != "assistant" for m in step.match.new)


def test_every_recording_is_covered() -> None:
    assert set(SCENARIOS) == {(cli, name) for cli in captured() for name in load_capture(cli)}


@pytest.mark.parametrize("scenario", ["stress", "clean-env-stress"])
def test_a_dropped_thinking_only_reply_is_the_one_fork(scenario: str) -> None:
    """Claude drops a reply without text or call and appends a nudge to the message before it: turn 7 leaves from 5."""
    forks = shape_of(steps_of("claude-code", scenario)).forks
    assert [number for number, _ in forks] == [7]
    assert forks[0][1].startswith("message 16 (user) differs")


def test_sub_agents_are_conversations_of_their_own() -> None:
    nested = steps_of("claude-code", "subagent-nested")
    assert [s.request.branch.partition(":")[0] for s in nested] == ["main", "subagent", "subagent", "subagent", "main"]
    for cli in ("codex", "opencode"):
        branches = [s.request.branch for s in steps_of(cli, "subagent")]
        assert len(set(branches)) == 2
        assert len([b for b in branches if b.startswith("subagent:")]) in (1, 2)


def test_the_table_in_the_documentation_is_what_comes_out() -> None:
    root = Path(__file__).parents[2]
    tool = runpy.run_path(str(root / "tools" / "capture_table.py"))
    assert (root / "docs" / "captures.md").read_text(encoding="utf-8") == tool["page"]()
