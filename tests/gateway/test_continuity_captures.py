"""Real clients' recorded conversations through continuity: one branch per conversation, and a reason for each fork."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandlot.chat.continuity import Continuity, Match
from sandlot.chat.messages import CallStatus, Message, ToolCall
from sandlot.gateway.wire import WIRES, ChatRequest, wire_for
from support.captures import headers_of, load_capture


def told_of(reply: dict[str, Any], offered: set[str]) -> tuple[Message, list[str], list[CallStatus]]:
    """The recorded answer as the assistant message that our gateway would remember."""
    calls: list[ToolCall] = []
    statuses: list[CallStatus] = []
    for call in reply["calls"]:
        try:
            arguments = json.loads(call["args_raw"]) if call["args_raw"] else {}
            bad = not isinstance(arguments, dict)
        except json.JSONDecodeError:
            arguments, bad = call["args_raw"], True
        calls.append(ToolCall(call["name"], arguments, call["id"]))
        statuses.append("invalid_arguments" if bad else "ok" if call["name"] in offered else "unknown_tool")
    message = Message("assistant", reply["text"] or "", reply["think"] or "", tuple(calls))
    return message, [c.id for c in calls], statuses


def replay(turns: list[dict[str, Any]]) -> list[tuple[ChatRequest, Match]]:
    """Feed a recorded session turn by turn, as if the recorded answers had been sampled here."""
    continuity, seen = Continuity(), []
    for number, turn in enumerate(turns):
        request = wire_for(turn["path"]).parse(turn["body"], headers_of(turn))
        match = continuity.match(request.messages, request.tools)
        seen.append((request, match))
        if "status" not in turn["our_reply"]:
            message, marks, statuses = told_of(turn["our_reply"], {t.name for t in request.tools})
            continuity.record(match, f"t{number}", message, marks, statuses)
    return seen


def parents(turns: list[dict[str, Any]]) -> list[str | None]:
    return [match.turn for _, match in replay(turns)]


CHAINS = [
    ("claude-code", "bare"),
    ("claude-code", "clean-env"),
    ("claude-code", "default-model"),
    ("claude-code", "max-tokens"),
    ("claude-code", "sonnet-4-5"),
    ("claude-code", "unknown-model"),
    ("pi", "chat"),
    ("pi", "anthropic"),
    ("pi", "stress-chat"),
]


@pytest.mark.parametrize(("cli", "scenario"), CHAINS)
def test_a_conversation_is_one_branch(cli: str, scenario: str) -> None:
    turns = load_capture(cli)[scenario]
    seen = replay(turns)
    assert [m.turn for _, m in seen] == [None, *(f"t{i}" for i in range(len(turns) - 1))]
    assert [m.fork for _, m in seen] == [""] * len(turns)
    for request, match in seen[1:]:
        assert match.new
        assert all(m.role != "assistant" for m in match.new)
        assert len(match.new) < len(request.messages)


def test_every_chain_scenario_of_the_captures_is_covered() -> None:
    paths = {path for wire in WIRES for path in wire.paths}
    there = {
        (cli, name)
        for cli in ("claude-code", "pi")
        for name, turns in load_capture(cli).items()
        if turns[0]["path"] in paths
    }
    forking = {
        ("claude-code", name)
        for name in (
            "clean-env-stress", "stress", "compaction", "context-error", "http400-retries", "subagent-async",
            "subagent-nested",
        )
    }  # fmt: skip
    assert there == set(CHAINS) | forking


@pytest.mark.parametrize("scenario", ["stress", "clean-env-stress"])
def test_a_dropped_thinking_only_reply_is_the_one_fork(scenario: str) -> None:
    """Claude drops a reply without text or call and appends a nudge to the message before it: turn 7 leaves from 5."""
    seen = replay(load_capture("claude-code")[scenario])
    assert [m.turn for _, m in seen] == [None, "t0", "t1", "t2", "t3", "t4", "t5", "t5"]
    assert [bool(m.fork) for _, m in seen] == [False] * 7 + [True]
    assert seen[7][1].fork.startswith("message 16 (user) differs")


def test_compaction_leaves_from_the_turn_before_and_starts_anew_after() -> None:
    seen = replay(load_capture("claude-code")["compaction"])
    assert [m.turn for _, m in seen] == [None, "t0", "t0", None, "t3"]
    assert not seen[1][1].fork
    assert seen[2][1].fork
    assert seen[3][1].fork
    assert not seen[4][1].fork


def test_sub_agents_are_conversations_of_their_own() -> None:
    nested = replay(load_capture("claude-code")["subagent-nested"])
    assert [m.turn for _, m in nested] == [None, None, None, "t1", "t0"]
    assert [r.branch.partition(":")[0] for r, _ in nested] == ["main", "subagent", "subagent", "subagent", "main"]
    asynchronous = replay(load_capture("claude-code")["subagent-async"])
    assert [m.turn for _, m in asynchronous] == [None, "t0", None, "t1"]
    assert {m.fork for _, m in nested if m.turn is None} >= {""}
    assert all(m.fork for _, m in nested[1:] if m.turn is None)


def test_a_context_error_and_retries_make_no_false_turn() -> None:
    seen = replay(load_capture("claude-code")["context-error"])
    assert seen[0][1].turn is None
    assert seen[1][1].turn == "t0"
    retries = replay(load_capture("claude-code")["http400-retries"])
    assert all(m.turn is None and not m.fork for _, m in retries)
