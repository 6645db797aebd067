"""What the end of each CLI means: outputs as the real CLIs print them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandlot.errors import ConfigError, FailureKind
from sandlot.harness import HARNESSES, Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.pi import Pi
from sandlot.sandbox import ExecResult

SPENT = "the budget of this session is spent: turns (2); finish now, do not retry"
LONG = "prompt is too long: 40000 tokens > 32768 maximum"


def _pi(code: int, said: str) -> ExecResult:
    return ExecResult(code, b"", said.encode() + b"\n")


def _claude(code: int, said: str, **more: Any) -> ExecResult:
    lines = [{"type": "system", "subtype": "init"}, {"type": "result", "is_error": bool(code), "result": said, **more}]
    return ExecResult(
        code, "\n".join(map(json.dumps, lines)).encode() + b"\n", b"[claude-code:unrecognized_model] {}\n"
    )


@pytest.mark.parametrize(
    ("harness", "result", "kind", "detail"),
    [
        (Pi(), _pi(0, ""), None, ""),
        (Pi(), _pi(1, '403: {"message":"' + SPENT + '","type":"permission_error"}'), FailureKind.BUDGET, SPENT),
        (Pi(), _pi(1, '400: {"message":"' + LONG + '"}'), FailureKind.CONTEXT_OVERFLOW, LONG),
        (
            Pi(),
            _pi(1, "Truncated: the model reached its output token limit."),
            FailureKind.BUDGET,
            "limit",
        ),
        (Pi(), _pi(1, "terminated: other side closed (UND_ERR_SOCKET)"), FailureKind.AGENT_ERROR, "exit code 1: term"),
        (Pi(), _pi(1, "ENOENT: cannot read budget.txt"), FailureKind.AGENT_ERROR, "budget.txt"),
        (ClaudeCode(), _claude(0, "Done."), None, ""),
        (ClaudeCode(), _claude(1, f"Failed to authenticate. API Error: 403 {SPENT}"), FailureKind.BUDGET, SPENT),
        (ClaudeCode(), _claude(1, "Prompt is too long"), FailureKind.CONTEXT_OVERFLOW, "Prompt is too long"),
        (
            ClaudeCode(),
            _claude(1, "API Error: Claude's response exceeded the 4096 output token maximum."),
            FailureKind.BUDGET,
            "4096",
        ),
        (ClaudeCode(), _claude(1, "API Error: 529 the engine is down."), FailureKind.AGENT_ERROR, "529"),
        (ClaudeCode(), ExecResult(1, b'{"type":"result", torn', b"no memory\n"), FailureKind.AGENT_ERROR, "no memory"),
    ],
)
def test_ends(harness: Harness, result: ExecResult, kind: FailureKind | None, detail: str) -> None:
    found, text = harness.failure(result)
    assert found == kind
    assert detail in text
    assert "\n" not in text


@pytest.mark.parametrize("harness", [Pi(), ClaudeCode()])
def test_killed_from_outside(harness: Harness) -> None:
    late = ExecResult(None, b"", b"", timed_out=True, duration=61.0)
    assert harness.failure(late) == (FailureKind.AGENT_TIMEOUT, "killed after 61 s")
    fat = ExecResult(None, b"", b"", out_of_memory=True)
    assert harness.failure(fat) == (FailureKind.AGENT_ERROR, "killed: out of memory")
    assert harness.failure(ExecResult(None, b"", b"")) == (FailureKind.AGENT_ERROR, "killed by a signal")


def test_a_claude_that_talks_of_results_is_not_mistaken() -> None:
    line = {"type": "assistant", "message": {"content": 'a line with "type":"result" in it'}}
    result = ExecResult(1, json.dumps(line).encode(), b"Prompt is too long")
    assert ClaudeCode().failure(result)[0] == FailureKind.CONTEXT_OVERFLOW


def test_small_contexts_get_the_bare_claude() -> None:
    small, large = (Endpoint("http://127.0.0.1:8000", "k", "m", window, 4096) for window in (32_768, 131_072))
    assert "--bare" in ClaudeCode().command("x", small).argv
    assert "--bare" not in ClaudeCode().command("x", large).argv
    assert "--bare" not in ClaudeCode(bare=False).command("x", small).argv
    assert "--bare" in ClaudeCode(bare=True).command("x", large).argv


def test_a_window_that_is_told_only_when_compaction_may_use_it() -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", "k", "m", 200_000, 4096)
    off, on = (ClaudeCode(compaction=c).command("x", endpoint).env for c in (False, True))
    assert off["DISABLE_AUTO_COMPACT"] == "1"
    assert off["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "1000000"
    assert "DISABLE_AUTO_COMPACT" not in on
    assert on["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "200000"


def test_pi_is_not_told_to_run_a_key() -> None:
    for key, written in (("sk-1", "sk-1"), ("!rm", "$!rm"), ("a$HOME", "a$$HOME")):
        models = Pi().models(Endpoint("http://127.0.0.1:8000", key, "m", 8192, 1024))
        assert models["providers"]["sandlot"]["apiKey"] == written


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not speak 'smoke'; it speaks chat, anthropic"):
        Pi("smoke")


def test_registered() -> None:
    assert [HARNESSES.get(name)().name for name in ("pi", "claude-code")] == ["pi", "claude-code"]
