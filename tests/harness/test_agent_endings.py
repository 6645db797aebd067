"""What the end of each CLI means: outputs as the real CLIs print them."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from sandlot.errors import ConfigError, FailureKind
from sandlot.harness import HARNESSES, Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.codex import Codex
from sandlot.harness.gemini_cli import GeminiCli
from sandlot.harness.mini_swe_agent import MiniSweAgent
from sandlot.harness.opencode import OpenCode
from sandlot.harness.pi import Pi
from sandlot.harness.qwen_code import QwenCode
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


def _codex(code: int, said: str) -> ExecResult:
    lines = [{"type": "turn.started"}, {"type": "error", "message": "Reconnecting... 1/2"}]
    lines += [{"type": "turn.failed", "error": {"message": said}}] if code else [{"type": "turn.completed"}]
    return ExecResult(code, "\n".join(map(json.dumps, lines)).encode() + b"\n", b"WARNING: proceeding\n")


def _gemini(code: int, said: str) -> ExecResult:
    report = f"Error when talking to Gemini API Full report available at: /tmp/x.json _ApiError: {said}"
    return ExecResult(code, b"", f"{report}\n    at process (file:///x.js:1:2) {{\n  status: 403\n}}\n".encode())


def _google(message: str) -> str:
    return json.dumps({"error": {"code": 403, "message": message, "status": "PERMISSION_DENIED"}})


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
        (Codex(), _codex(0, ""), None, ""),
        (Codex(), _codex(1, f"unexpected status 403 Forbidden: {SPENT}, url: x"), FailureKind.BUDGET, SPENT),
        (Codex(), _codex(1, "Codex ran out of room in the model's context window."), FailureKind.CONTEXT_OVERFLOW, ""),
        (
            Codex(),
            _codex(1, "Incomplete response returned, reason: max_output_tokens"),
            FailureKind.BUDGET,
            "exit code 1: Incomplete",
        ),
        (Codex(), _codex(1, "stream disconnected before completion"), FailureKind.AGENT_ERROR, "exit code 1: stream"),
        (Codex(), ExecResult(1, b'{"type":"error", torn', b"no home\n"), FailureKind.AGENT_ERROR, "no home"),
        (
            OpenCode(),
            _pi(1, f"\x1b[0m$ \x1b[0mecho hi\nhi\n\x1b[91m\x1b[1mError: \x1b[0m{SPENT}"),
            FailureKind.BUDGET,
            f"exit code 1: {SPENT}",
        ),
        (QwenCode(), _pi(1, f"[API Error: 400 {LONG}]"), FailureKind.CONTEXT_OVERFLOW, LONG),
        (GeminiCli(), _gemini(1, _google(SPENT)), FailureKind.BUDGET, f"exit code 1: {SPENT}"),
        (GeminiCli(), _gemini(1, _google(LONG)), FailureKind.CONTEXT_OVERFLOW, LONG),
        (GeminiCli(), _gemini(1, "{torn}"), FailureKind.AGENT_ERROR, "status: 403"),
        (MiniSweAgent(), _pi(1, f"PermissionDeniedError: OpenAIException - {SPENT}"), FailureKind.BUDGET, SPENT),
        (ClaudeCode(), ExecResult(1, b'{"type":"result", torn', b"no memory\n"), FailureKind.AGENT_ERROR, "no memory"),
    ],
)
def test_ends(harness: Harness, result: ExecResult, kind: FailureKind | None, detail: str) -> None:
    found, text = harness.failure(result)
    assert found == kind
    assert detail in text
    assert "\n" not in text


DEEP = b'{"type":"result","error":' + b"[" * 200_000
"""What an agent's command can write to the output of its CLI: a line that no parser takes."""


@pytest.mark.parametrize("harness", [HARNESSES.get(name)() for name in HARNESSES.names()])
def test_hostile_output_is_no_fault_of_ours(harness: Harness) -> None:
    long = b"ApiError: {" * 100_000
    found, text = harness.failure(ExecResult(1, DEEP + b"\n" + long, b"ApiError: " + DEEP + b"\n" + long + b"\nbye\n"))
    assert (found, text[-3:]) == (FailureKind.AGENT_ERROR, "bye")


@pytest.mark.parametrize("harness", [HARNESSES.get(name)() for name in HARNESSES.names()])
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


def test_codex_is_configured_in_toml() -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", "k", 'a "quoted" model', 100_000, 4096)
    off, on = (tomllib.loads(Codex(compaction=c).config(endpoint)) for c in (False, True))
    assert off["model"] == 'a "quoted" model'
    assert off["model_providers"]["sandlot"]["base_url"] == "http://127.0.0.1:8000/v1"
    assert "k" not in off["model_providers"]["sandlot"].values()
    assert off["model_auto_compact_token_limit"] > 10**8
    assert on["model_auto_compact_token_limit"] == 100_000 - 4096 - 1024
    assert on["model_context_window"] == 100_000
    assert tomllib.loads(Codex(as_model="gpt-5.5").config(endpoint))["model"] == "gpt-5.5"


def test_compaction_is_off_unless_wanted() -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", "k", "m", 100_000, 4096)
    off, on = (QwenCode(compaction=c).settings(endpoint)["model"]["generationConfig"] for c in (False, True))
    assert off["contextWindowSize"] > 10**8
    assert on["contextWindowSize"] == 100_000
    off, on = (OpenCode(compaction=c).config(endpoint)["compaction"] for c in (False, True))
    assert (off["auto"], on["auto"]) == (False, True)
    off, on = (GeminiCli(compaction=c).settings(endpoint)["model"]["compressionThreshold"] for c in (False, True))
    assert off > 1 > on
    off, on = (int(GeminiCli(compaction=c).flags(endpoint)["flags"][0]["intValue"]) for c in (False, True))
    assert (off > 10**8, on) == (True, 25_000)


@pytest.mark.parametrize("kind", [Pi, OpenCode, QwenCode, MiniSweAgent])
def test_an_unknown_wire_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"does not speak 'smoke'; it speaks chat, anthropic"):
        kind("smoke")


def test_registered_under_their_own_names() -> None:
    names = HARNESSES.names()
    assert [HARNESSES.get(name)().name for name in names] == names
    assert len(names) >= 7
