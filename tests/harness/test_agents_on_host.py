"""The real CLIs against a scripted vendor, on the host: every request they make, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import FailureKind
from sandlot.harness import Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.pi import Pi
from sandlot.sandbox import ExecResult
from support.host_cli import run_on_host
from support.mock_vendor import Break, Call, Refuse, Say, Step, Vendor

pytestmark = [pytest.mark.npm, pytest.mark.slow]

AGENTS: list[Any] = [
    pytest.param(Pi(), id="pi-chat"),
    pytest.param(Pi("anthropic"), id="pi-anthropic"),
    pytest.param(ClaudeCode(), id="claude-bare"),
    pytest.param(ClaudeCode(bare=False), id="claude-full"),
]
agents = pytest.mark.parametrize("harness", AGENTS)
SPENT = Refuse(403, "permission_error", "the budget of this session is spent: turns (1); finish now, do not retry")
LONG = Refuse(400, "invalid_request_error", "prompt is too long: 40000 tokens > 32768 maximum")
DOWN = Refuse(529, "overloaded_error", "the engine is down")


def _shell(harness: Harness, *commands: str, **say: Any) -> Say:
    name = "Bash" if harness.name == "claude-code" else "bash"
    return Say(calls=tuple(Call(name, {"command": c}) for c in commands), **say)


async def _run(
    harness: Harness, script: list[Step], tmp_path: Path, prompt: str = "Write hello.txt."
) -> tuple[Vendor, ExecResult]:
    vendor = Vendor(script)
    async with vendor.serve() as url:
        endpoint = Endpoint(url, "sk-secret", "policy", 32_768, 4096)
        return vendor, await run_on_host(harness, endpoint, prompt, tmp_path)


def _user_texts(body: Any) -> list[str]:
    content = next(m["content"] for m in body["messages"] if m["role"] == "user")
    return [content] if isinstance(content, str) else [block["text"] for block in content]


def _plain(messages: Any) -> Any:
    """Messages with a lone text block written as a string: Claude Code does either."""
    return [
        {**m, "content": m["content"][0]["text"]}
        if isinstance(m["content"], list) and len(m["content"]) == 1 and m["content"][0].keys() == {"type", "text"}
        else m
        for m in messages
    ]


@agents
async def test_works_and_ends(harness: Harness, tmp_path: Path) -> None:
    script: list[Step] = [
        _shell(harness, "echo hello > hello.txt", thinking="A file it is.", text="I write it."),
        _shell(harness, "cat hello.txt", "sleep 0.05; ls"),
        Say("Done."),
    ]
    vendor, result = await _run(harness, script, tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert (tmp_path / "work/hello.txt").read_text() == "hello\n"
    path = "/v1/chat/completions" if harness.protocols[0] == "chat" else "/v1/messages?beta=true"
    assert [(a.method, a.path) for a in vendor.asked] == [("POST", path)] * 3
    for asked in vendor.asked:
        assert "sk-secret" in (asked.headers.get("x-api-key"), asked.headers.get("authorization", "")[7:])
        assert asked.body["model"] == "policy"
        assert asked.body["stream"] is True
        assert asked.body.get("max_tokens", asked.body.get("max_completion_tokens")) == 4096
    # The history only grows.
    first, second, third = (_plain(a.body["messages"]) for a in vendor.asked)
    if isinstance(harness, ClaudeCode):
        assert second[: len(first)] == first
        assert third[: len(second)] == second
        assert "cache_control" not in str(third)
        assert "billing" not in str(vendor.asked[0].body["system"])
    assert "hello" in str(third[len(second) :])


@agents
@pytest.mark.parametrize(
    "prompt",
    ["- a dash, @x, $HOME, `cmd`, café\n\n  indented\n", "/help me\nwith this", "word " * 40_000],
    ids=["odd", "slash", "long"],
)
async def test_the_statement_reaches_the_model_whole(harness: Harness, prompt: str, tmp_path: Path) -> None:
    vendor, result = await _run(harness, [Say("Done.")], tmp_path, prompt)
    assert result.ok, result.text()
    assert _user_texts(vendor.posts[0].body)[-1].strip() == prompt.strip()


@agents
@pytest.mark.parametrize(
    ("refusal", "kind"), [(SPENT, FailureKind.BUDGET), (LONG, FailureKind.CONTEXT_OVERFLOW)], ids=["budget", "overflow"]
)
async def test_a_final_refusal_ends_it_at_once(
    harness: Harness, refusal: Refuse, kind: FailureKind, tmp_path: Path
) -> None:
    vendor, result = await _run(harness, [_shell(harness, "echo hello > hello.txt"), refusal], tmp_path)
    assert harness.failure(result)[0] == kind, result.text()
    assert result.exit_code == 1
    assert len(vendor.posts) == 2
    assert (tmp_path / "work/hello.txt").exists()


@agents
@pytest.mark.parametrize(
    "fault", [DOWN, Break("half an ans"), Break("", "overloaded_error", "overloaded: the engine is down")],
    ids=["529", "cut", "event"],
)  # fmt: skip
async def test_a_passing_fault_is_asked_again(harness: Harness, fault: Step, tmp_path: Path) -> None:
    vendor, result = await _run(harness, [_shell(harness, "true"), fault, Say("Done.")], tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert len(vendor.posts) == 3
    assert vendor.posts[2].body["messages"] == vendor.posts[1].body["messages"]


@agents
async def test_reported_usage_does_not_end_it(harness: Harness, tmp_path: Path) -> None:
    """How full the context is, is for the gateway to say."""
    vendor, result = await _run(harness, [_shell(harness, "true", usage=32_700), Say("Done.", usage=32_760)], tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert len(vendor.posts) == 2


@agents
async def test_answers_cut_at_the_limit_are_a_spent_budget(harness: Harness, tmp_path: Path) -> None:
    _, result = await _run(harness, [Say("and so on", length=True)], tmp_path)
    assert harness.failure(result)[0] == FailureKind.BUDGET, result.text()
