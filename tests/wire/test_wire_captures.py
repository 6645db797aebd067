"""Every recorded request of the real CLIs is understood, and its history only grows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sandlot.chat.messages import Message, canonical_json
from sandlot.gateway.wire import WIRES, ChatRequest, wire_for
from sandlot.gateway.wire.canon import arguments_of, visible
from support.captures import headers_of, load_capture

SPOKEN = {path for wire in WIRES for path in wire.paths}
SCENARIOS = [
    (cli, name)
    for cli in ("claude-code", "pi")
    for name, turns in load_capture(cli).items()
    if turns[0]["path"] in SPOKEN
]
GROWING = [
    ("claude-code", name)
    for name in (
        "bare",
        "clean-env",
        "clean-env-stress",
        "default-model",
        "max-tokens",
        "sonnet-4-5",
        "stress",
        "unknown-model",
    )
] + [("pi", name) for name in ("anthropic", "chat", "stress-chat")]


def parse(turn: dict[str, Any]) -> ChatRequest:
    return wire_for(turn["path"]).parse(turn["body"], headers_of(turn))


@pytest.mark.parametrize(("cli", "scenario"), SCENARIOS)
def test_every_request_is_understood(cli: str, scenario: str) -> None:
    for turn in load_capture(cli)[scenario]:
        asked = parse(turn)
        body = turn["body"]
        assert [t.name for t in asked.tools] == [t.get("name") or t["function"]["name"] for t in body["tools"]]
        assert asked.stream
        assert asked.max_tokens == (body.get("max_tokens") or body.get("max_completion_tokens"))
        assert asked.messages[0].role == "system"
        assert not any("x-anthropic-billing-header" in m.text for m in asked.messages)
        known = {c.id for m in asked.messages for c in m.tool_calls}
        results = [m.tool_call_id for m in asked.messages if m.role == "tool"]
        assert set(results) <= known
        assert all(m.text.strip() for m in asked.messages if m.role in ("system", "user"))


@pytest.mark.parametrize(("cli", "scenario"), SCENARIOS)
def test_own_turns_are_known_by_what_was_minted(cli: str, scenario: str) -> None:
    turns = load_capture(cli)[scenario]
    minted = {c["id"]: turn["our_reply"] for turn in turns for c in turn["our_reply"].get("calls", ())}
    seen = 0
    for turn in turns:
        for message in parse(turn).messages:
            replies = [minted[mark] for mark in message.marks if mark in minted]
            if not replies:
                continue
            seen += 1
            assert all(r is replies[0] for r in replies)
            reply = replies[0]
            assert message.text == visible(reply["text"] or "")
            assert message.reasoning == (reply["think"] or "")
            assert [c.name for c in message.tool_calls] == [c["name"] for c in reply["calls"]]
            for came, sent in zip(message.tool_calls, reply["calls"], strict=True):
                told = arguments_of(sent["args_raw"])
                if isinstance(told, dict):
                    assert isinstance(came.arguments, dict)
                    assert canonical_json(came.arguments) == canonical_json(told)
                elif cli == "claude-code":
                    assert came.arguments == told
    if len(turns) > 1 and scenario != "http400-retries":
        assert seen


def same(a: Message, b: Message) -> bool:
    return a == b and a.digest == b.digest


@pytest.mark.parametrize(("cli", "scenario"), GROWING)
def test_history_only_grows(cli: str, scenario: str) -> None:
    """The canonical messages of a turn are a prefix of the next turn's, and what follows them is our own answer."""
    turns = load_capture(cli)[scenario]
    answered = 0
    for before, after in pairwise(turns):
        old, new = parse(before), parse(after)
        assert old.tools == new.tools
        assert len(new.messages) > len(old.messages)
        assert all(same(a, b) for a, b in zip(old.messages, new.messages, strict=False))
        reply = before["our_reply"]
        following = new.messages[len(old.messages)]
        if not reply["text"] and not reply["calls"]:
            continue  # only a thought: the client drops it and asks on
        answered += 1
        assert following.role == "assistant"
        assert following.text == visible(reply["text"] or "")
        assert [c.id for c in following.tool_calls] == [c["id"] for c in reply["calls"]]
        rest = new.messages[len(old.messages) + 1 :]
        assert [m.tool_call_id for m in rest[: len(reply["calls"])]] == [c["id"] for c in reply["calls"]]
        assert not any(m.role == "assistant" for m in rest)
    assert answered >= len(turns) - 2


def test_sub_agents_are_named_by_their_header() -> None:
    turns = load_capture("claude-code")["subagent-nested"]
    branches = [parse(turn).branch for turn in turns]
    child, grandchild = "subagent:a46535a284b865c64", "subagent:ac4b7250096412a5b"
    assert branches == ["main", child, grandchild, child, "main"]


def test_a_second_process_resumes_the_same_history() -> None:
    first, resumed = (parse(load_capture("pi")["chat"][i]) for i in (3, 4))
    assert resumed.messages[: len(first.messages)] == first.messages
    assert resumed.messages[-1].role == "user"
