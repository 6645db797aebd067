"""Every recorded request of the real CLIs is understood, and its history only grows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sandlot.chat.messages import Message, canonical_json
from sandlot.gateway.wire import ChatRequest, wire_for
from sandlot.gateway.wire.canon import arguments_of, visible
from support.captures import captured, load_capture
from support.replay import asked

SCENARIOS = [(cli, name) for cli in captured() for name in load_capture(cli)]
OWN = [
    (cli, name)
    for cli in ("claude-code", "pi")
    for name, turns in load_capture(cli).items()
    if wire_for(turns[0]["path"]).name != "google"  # whose clients may drop ids
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
] + [("pi", name) for name in ("anthropic", "chat", "responses", "stress-chat")]


def parse(turn: dict[str, Any]) -> ChatRequest:
    return asked(turn)


def declared(tools: Any) -> list[str]:
    """Names of the tools of a recorded request, in whatever shape its protocol has."""
    names: list[str] = []
    for tool in tools or []:
        functions = tool.get("functionDeclarations") or tool.get("function_declarations")
        if functions:
            names += [function["name"] for function in functions]
        elif tool.get("type") == "namespace":
            names += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
        elif tool.get("type") != "web_search" and not tool.get("defer_loading"):
            names.append(tool.get("name") or tool.get("function", {}).get("name") or tool["type"])
    return names


@pytest.mark.parametrize(("cli", "scenario"), SCENARIOS)
def test_every_request_is_understood(cli: str, scenario: str) -> None:
    for turn in load_capture(cli)[scenario]:
        request, body = parse(turn), turn["body"]
        assert [t.name for t in request.tools] == declared(body.get("tools"))
        assert request.stream == (body.get("stream") is True or ":streamGenerateContent" in turn["path"])
        assert request.framing == "events" or not request.stream
        wishes = {**body, **body.get("generationConfig", {})}
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
        assert request.max_tokens == next((wishes[name] for name in names if name in wishes), None)
        if cli != "mini-swe-agent":  # which puts everything into its first user message
            assert request.messages[0].role == "system"
        assert not any("x-anthropic-billing-header" in m.text for m in request.messages)
        assert not any("left out: this model reads text only" in m.text for m in request.messages)
        known = {c.id for m in request.messages for c in m.tool_calls}
        results = [m.tool_call_id for m in request.messages if m.role == "tool"]
        assert set(results) <= known
        assert all(m.text.strip() for m in request.messages if m.role in ("system", "user"))


@pytest.mark.parametrize(("cli", "scenario"), OWN)
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


def test_codex_threads_and_compactions_are_told_apart() -> None:
    spawned = [parse(turn).branch for turn in load_capture("codex")["subagent"]]
    assert [branch.partition(":")[0] for branch in spawned] == ["main", "main", "main", "subagent", "main"]
    assert [parse(turn).branch for turn in load_capture("codex")["compaction"]] == ["main", "main", "side", "main"]


def test_tools_that_a_search_found_can_be_called_but_are_not_listed() -> None:
    turns = load_capture("codex")["subagent"]
    before, after = parse(turns[0]), parse(turns[1])
    assert after.tools == before.tools
    assert before.found == ()
    found = {tool.name: tool for tool in after.found}
    assert found["multi_agent_v1__spawn_agent"].namespace == "multi_agent_v1"
    result = after.messages[-1]
    assert (result.role, result.tool_name) == ("tool", "tool_search")
    assert "multi_agent_v1__spawn_agent" in result.text
