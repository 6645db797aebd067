"""Real agent CLIs against a served gateway, in every dialect they speak: one branch, one sample, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import FailureKind
from sandlot.gateway import SessionLimits
from sandlot.harness import Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.codex import Codex
from sandlot.harness.gemini_cli import GeminiCli
from sandlot.harness.mini_swe_agent import MiniSweAgent
from sandlot.harness.opencode import OpenCode
from sandlot.harness.pi import Pi
from sandlot.harness.qwen_code import QwenCode
from sandlot.sandbox import ExecResult
from support.host_cli import run_on_host
from support.policy import call_text
from support.rig import MakeRig, Rig
from support.told_agents import broken_call, farewell, in_turn, shell_call, thinking

pytestmark = [pytest.mark.npm, pytest.mark.slow]

WIRES = ("chat", "anthropic", "responses", "google")
AGENTS: list[Any] = [
    *(pytest.param(Pi(wire), id=f"pi-{wire}") for wire in WIRES),
    pytest.param(ClaudeCode(), id="claude-code"),
    pytest.param(Codex(), id="codex"),
    pytest.param(Codex(as_model="gpt-5.5"), id="codex-as-gpt"),
    *(pytest.param(OpenCode(wire), id=f"opencode-{wire}") for wire in WIRES),
    *(pytest.param(QwenCode(wire), id=f"qwen-code-{wire}") for wire in WIRES),
    pytest.param(GeminiCli(), id="gemini-cli"),
]
MINI: list[Any] = [
    pytest.param(MiniSweAgent(wire), id=f"mini-swe-agent-{wire}") for wire in ("chat", "anthropic", "google")
]
ENDING: list[Any] = [
    pytest.param(harness, id=harness.name) for harness in (Codex(), OpenCode(), QwenCode(), GeminiCli(), MiniSweAgent())
]
ASKED_AGAIN = {("qwen-code", "anthropic")}
"""Whose answer to a broken call is the same request again: the turn stays, as a branch of its own."""


async def _run(
    rig: Rig, harness: Harness, tmp_path: Path, *, base: str | None = None, prompt: str = "Write hello.txt."
) -> ExecResult:
    endpoint = Endpoint(base or rig.url, rig.opened.api_key, "policy", 120_000, 8_000)
    return await run_on_host(harness, endpoint, prompt, tmp_path)


@pytest.mark.parametrize("harness", AGENTS)
async def test_a_task_with_parallel_and_bad_calls_is_one_branch(
    make_rig: MakeRig, tmp_path: Path, harness: Harness
) -> None:
    said = [
        thinking("First I write.", shell_call(harness, "echo hi > hello.txt", before="I write.\n")),
        shell_call(harness, "cat hello.txt") + "\n" + shell_call(harness, "ls -a"),
        call_text("no_such_tool", {"a": 1}),
        broken_call(harness, before="A broken call.\n"),
        thinking("I look.", shell_call(harness, "printf 'caf\u00e9'")),
        farewell(harness),
    ]
    rig = await make_rig(in_turn(said))
    result = await _run(rig, harness, tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    turns = rig.session.turns
    assert len(turns) == len(said)
    assert rig.session.counters.calls == {"ok": 4, "invalid_arguments": 1, "unknown_tool": 1}
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    parents = [None, *(t.id for t in turns[:-1])]
    if (harness.name, harness.protocols[0]) in ASKED_AGAIN:
        parents[4] = turns[2].id
        assert [why for _, why in rig.session.forks] == ["the same history again"]
        assert len(finished.samples) == 2
    else:
        assert rig.session.forks == []
        (sample,) = finished.samples
        assert sum(sample.loss_mask) == sum(len(ids) for ids in rig.engine.sampled)
    assert [t.parent for t in turns] == parents


@pytest.mark.parametrize("harness", MINI)
async def test_mini_is_one_branch_until_it_drops_a_turn(make_rig: MakeRig, tmp_path: Path, harness: Harness) -> None:
    """It keeps no call it cannot read: the error is told to a history without it."""
    said = [
        thinking("First I write.", shell_call(harness, "echo hi > hello.txt", before="I write.\n")),
        shell_call(harness, "cat hello.txt") + "\n" + shell_call(harness, "ls -a"),
        call_text("no_such_tool", {"a": 1}),
        broken_call(harness, before="A broken call.\n"),
        thinking("I look.", shell_call(harness, "printf 'caf\u00e9'")),
        farewell(harness),
    ]
    rig = await make_rig(in_turn(said))
    result = await _run(rig, harness, tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    turns = rig.session.turns
    assert rig.session.counters.calls == {"ok": 5, "invalid_arguments": 1, "unknown_tool": 1}
    assert [t.parent for t in turns] == [None, *(turns[k].id for k in (0, 1, 1, 1, 4))]
    assert len(rig.session.forks) == 2
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == 3


@pytest.mark.parametrize("harness", [pytest.param(Pi(wire), id=f"pi-{wire}") for wire in WIRES])
async def test_a_session_in_the_path(make_rig: MakeRig, tmp_path: Path, harness: Harness) -> None:
    rig = await make_rig(in_turn([shell_call(harness, "echo hi > hello.txt"), "Done."]))
    result = await _run(rig, harness, tmp_path, base=f"{rig.url}/s/{rig.session.id}")
    assert harness.failure(result) == (None, ""), result.text()
    assert len(rig.session.turns) == 2


@pytest.mark.parametrize("harness", ENDING)
async def test_the_statement_arrives_whole_and_a_spent_budget_ends_it(
    make_rig: MakeRig, tmp_path: Path, harness: Harness
) -> None:
    """What a shell, a parser or the CLI itself would take for its own, and more than an argument holds."""
    statement = "/help me with - a dash, @app.route('/a b'), $HOME, `cmd`, café\n\n  indented\n" + "word " * 30_000
    rig = await make_rig(
        in_turn([shell_call(harness, "echo hi >> hello.txt")]), limits=SessionLimits(turns=1), max_context=500_000
    )
    result = await _run(rig, harness, tmp_path, prompt=statement)
    assert statement.strip() in rig.engine.fmt.tokenizer.decode(rig.engine.prompts[0])
    assert harness.failure(result)[0] == FailureKind.BUDGET, result.text()
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    assert len(rig.session.turns) == 1


@pytest.mark.parametrize("harness", ENDING)
async def test_a_full_context_ends_it_at_once(make_rig: MakeRig, tmp_path: Path, harness: Harness) -> None:
    rig = await make_rig(in_turn(["Done."]), max_context=1024)
    result = await _run(rig, harness, tmp_path)
    assert harness.failure(result)[0] == FailureKind.CONTEXT_OVERFLOW, result.text()
    assert rig.session.turns == []
