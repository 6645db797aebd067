"""Real clients' recorded conversations through continuity: one branch per conversation, and a reason for each fork."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.continuity import Continuity, Match
from sandlot.chat.messages import Message, ToolCall
from support.captures import captured, load_capture
from support.replay import Step, asked, replay, shape_of
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
    answered = 0
    for number, step in enumerate(steps_of(cli, scenario)):
        match = step.match
        plain = match.turn is not None and match.turn not in used
        assert bool(match.fork) == (not plain and answered > 0), (number, match.fork)
        if step.answered:
            used.add(match.turn)
            answered += 1


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


def test_results_stand_under_the_names_that_were_called() -> None:
    """OpenCode calls what it cannot run `invalid`, in its results too."""
    renamed = 0
    for scenario in (name for cli, name in SCENARIOS if cli == "opencode" and "stress" in name):
        turns = load_capture("opencode")[scenario]
        for step in replay(turns):
            if step.match.turn is None:
                continue
            called = {call["id"]: call["name"] for call in turns[int(step.match.turn[1:])]["our_reply"]["calls"]}
            results = [m for m in step.match.new if m.role == "tool"]
            assert [m.tool_name for m in results] == [called.get(m.tool_call_id, m.tool_name) for m in results]
            renamed += sum(m.tool_name == "invalid" for m in step.request.messages[-len(step.match.new) :])
    assert renamed


def first_call(message: Message, **changes: Any) -> Message:
    """The message with its first call changed."""
    call, *others = message.tool_calls
    return replace(message, tool_calls=(replace(call, **changes), *others))


KEPT: dict[str, Callable[[Message], Message]] = {
    "trimmed text": lambda m: replace(m, text=m.text.strip()),
    "thoughts dropped": lambda m: replace(m, reasoning=""),
    "thoughts and all marks but one dropped": lambda m: replace(m, reasoning="", marks=m.marks[-1:]),
    "ids dropped": lambda m: first_call(m, id=""),
    "numbers and keys written otherwise": lambda m: first_call(
        m, arguments=dict(reversed(dict(m.tool_calls[0].arguments).items()))
    ),
}
EDITED: dict[str, tuple[Callable[[Message], Message], str]] = {
    "another text": (lambda m: replace(m, text=m.text + " and more"), "edited text of turn t0"),
    "other arguments": (lambda m: first_call(m, arguments={"command": "rm -rf /"}), "edited arguments of turn t0"),
    "one argument more, empty": (
        lambda m: first_call(m, arguments={**dict(m.tool_calls[0].arguments), "more": ""}),
        "edited arguments of turn t0",
    ),
    "another name": (lambda m: first_call(m, name="other"), "renamed call of turn t0"),
    "no calls": (lambda m: replace(m, tool_calls=()), "added or removed calls of turn t0"),
    "marks of two turns": (lambda m: replace(m, marks=(*m.marks, "call_of_t1")), "joins pieces of 2 turns"),
}
CLIENTS = [("pi", "chat"), ("pi", "anthropic"), ("pi", "responses"), ("pi", "gemini"), ("codex", "gpt-5.5")]


def changed(cli: str, scenario: str, change: Callable[[Message], Message]) -> Match:
    """The third request of a session, with our first turn in its history changed by the client."""
    turns, continuity = load_capture(cli)[scenario][:3], Continuity()
    other = replay(turns, continuity, answers=2)[1].request
    continuity.record(continuity.match(other.messages, other.tools), "t9", Message("assistant", marks=("call_of_t1",)))
    request = asked(turns[2])
    at = next(i for i, m in enumerate(request.messages) if m.role == "assistant")
    messages = list(request.messages)
    messages[at] = change(messages[at])
    return continuity.match(messages, request.tools)


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
@pytest.mark.parametrize("mutation", KEPT)
def test_what_clients_do_without_meaning_it_keeps_the_branch(cli: str, scenario: str, mutation: str) -> None:
    match = changed(cli, scenario, KEPT[mutation])
    assert (match.turn, match.fork) == ("t1", "")


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
@pytest.mark.parametrize("edit", EDITED)
def test_a_real_edit_leaves_the_branch_and_says_why(cli: str, scenario: str, edit: str) -> None:
    change, reason = EDITED[edit]
    match = changed(cli, scenario, change)
    assert match.turn is None
    assert reason in match.fork


@pytest.mark.parametrize(("cli", "scenario"), [c for c in CLIENTS if c[1] != "gemini"])  # there the ids are dropped
def test_a_call_may_come_back_in_a_form_of_the_clients_own_once(cli: str, scenario: str) -> None:
    """Known by its id alone, whatever the client made of its arguments; another form after that is an edit."""
    first, second = load_capture(cli)[scenario][:2]
    continuity = Continuity()
    replay([first], continuity)
    request = asked(second)

    def matched(form: dict[str, Any]) -> Match:
        messages = [first_call(m, arguments=form) if m.role == "assistant" else m for m in request.messages]
        return continuity.match(messages, request.tools)

    form = {"command": "ls", "all": False}
    assert matched(form).turn == "t0"
    assert matched(form).turn == "t0"
    edited = matched({**form, "all": True})
    assert edited.turn is None
    assert "edited arguments of turn t0" in edited.fork


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
def test_an_answer_of_the_clients_own_after_a_turn_is_no_fork(cli: str, scenario: str) -> None:
    """As Claude Code gives one when it goes on with a conversation that was interrupted."""
    turns, continuity = load_capture(cli)[scenario][:2], Continuity()
    replay(turns, continuity, answers=1)
    request = asked(turns[1])
    own = (Message("assistant", "No response requested."), Message("user", "Go on."))
    match = continuity.match([*request.messages, *own], request.tools)
    assert (match.turn, match.new[-2:], match.fork) == ("t0", own, "")


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
def test_a_late_difference_in_a_long_message_is_what_is_quoted(cli: str, scenario: str) -> None:
    first = asked(load_capture(cli)[scenario][0])
    head, *others = first.messages
    continuity = Continuity()
    for turn, day in enumerate(("Monday", "Tuesday")):
        prompt = replace(head, text=f"{'You are an agent. ' * 5000}Today is {day}. {'Rules. ' * 5000}")
        match = continuity.match([prompt, *others], first.tools)
        continuity.record(match, f"t{turn}", Message("assistant"))
    quoted = match.fork.removeprefix(f"message 0 ({head.role}) differs: ")
    assert quoted.startswith("'…an agent. Today is Tuesday. Rules. ")
    assert len(quoted) == len("'…'") + 80


def test_of_a_message_without_text_its_calls_are_quoted() -> None:
    continuity, user = Continuity(), Message("user", "go")
    continuity.record(continuity.match([user], ()), "t0", Message("assistant"))
    call = ToolCall("bash", {"command": "ls"})
    match = continuity.match([user, Message("assistant", tool_calls=(call,)), Message("tool", "a.py")], ())
    assert match.fork == """message 1 (assistant) differs: 'bash {"command":"ls"}'"""


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
def test_an_error_flag_that_comes_and_goes_is_no_change(cli: str, scenario: str) -> None:
    """No template shows it."""
    turns, continuity = load_capture(cli)[scenario][:3], Continuity()
    replay(turns, continuity, answers=2)
    request = asked(turns[2])
    flipped = [replace(m, is_error=not m.is_error) if m.role == "tool" else m for m in request.messages]
    match = continuity.match(flipped, request.tools)
    assert (match.turn, match.fork) == ("t1", "")


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
def test_a_fork_names_where_it_leaves_all_branches(cli: str, scenario: str) -> None:
    """An edit that another branch has too is not where they part."""
    turns, continuity = load_capture(cli)[scenario][:3], Continuity()
    replay(turns, continuity, answers=2)
    request = asked(turns[2])
    messages = list(request.messages)
    at = next(i for i, m in enumerate(messages) if m.role == "assistant")
    messages[at] = replace(messages[at], text="edited")
    edited = continuity.match(messages, request.tools)
    assert "edited text of turn t0" in edited.fork
    continuity.record(edited, "t9", Message("assistant"))
    later = len(messages) - 1
    messages[later] = replace(messages[later], text="something else")
    match = continuity.match(messages, request.tools)
    assert match.fork == f"message {later} ({messages[later].role}) differs: 'something else'"


@pytest.mark.parametrize(("cli", "scenario"), CLIENTS)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_edit_before_or_after_a_turn_is_named(cli: str, scenario: str, role: str) -> None:
    turns, continuity = load_capture(cli)[scenario][:3], Continuity()
    replay(turns, continuity, answers=2)
    request = asked(turns[2])
    at = next(i for i, m in enumerate(request.messages) if m.role == role)
    messages = list(request.messages)
    messages[at] = replace(messages[at], text="something else")
    match = continuity.match(messages, request.tools)
    assert match.turn == (None if role == "user" else "t0")
    assert match.fork == f"message {at} ({role}) differs: 'something else'"


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
