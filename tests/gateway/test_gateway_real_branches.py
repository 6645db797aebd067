"""Real agent CLIs where one episode is several conversations: sub-agents, summaries, answers that were cut.

Whatever they make of it: every conversation finds its own branch, and every token is trained once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import FailureKind
from sandlot.harness import Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.codex import Codex
from sandlot.harness.gemini_cli import GeminiCli
from sandlot.harness.opencode import OpenCode
from sandlot.harness.pi import Pi
from sandlot.harness.qwen_code import QwenCode
from support.cut_proxy import cutting
from support.host_cli import run_on_host
from support.policy import Say, call_text
from support.rig import MakeRig, Rig
from support.told_agents import in_turn, shell_call, thinking

pytestmark = [pytest.mark.npm, pytest.mark.slow]

SPAWN = {
    "claude-code": ("Agent", {"subagent_type": "general-purpose", "description": "a part"}, "prompt"),
    "opencode": ("task", {"subagent_type": "general", "description": "a part"}, "prompt"),
    "codex": ("multi_agent_v1__spawn_agent", {}, "message"),
}
SUMMARY = "<state_snapshot><summary>All is said.</summary></state_snapshot>"
WAIT = "for i in $(seq 600); do [ -e a ] && [ -e b ] && exit; sleep 0.1; done; exit 1"
"""What a parent does whose sub-agents work beside it: it ends when both have written their file."""


def spawn(harness: Harness, name: str) -> str:
    """A call that starts the sub-agent `name`."""
    tool, fixed, field = SPAWN[harness.name]
    return call_text(tool, {**fixed, field: f"You are {name}. Do your part."})


def by_name(rig: list[Rig], plans: dict[str, list[str]]) -> Say:
    """Each conversation says its own plan, turn by turn; it is known by whom its first message addresses."""
    said = dict.fromkeys(plans, 0)

    def say(prompt: list[int], number: int) -> str:
        text = rig[0].engine.fmt.tokenizer.decode(prompt)
        name = min((n for n in plans if f"You are {n}." in text), key=lambda n: text.index(f"You are {n}."))
        said[name] += 1
        return plans[name][min(said[name], len(plans[name])) - 1]

    return say


def long_result(harness: Harness, work: Path, numbers: int) -> str:
    """A call whose result is so many numbers. On a busy machine Qwen Code's shell loses what a command says."""
    if harness.name != "qwen-code":
        return shell_call(harness, f"seq 1 {numbers}")
    lines = [" ".join(map(str, range(first, first + 8))) for first in range(1, numbers + 1, 8)]
    file = work / f"{numbers}.txt"
    file.write_text("\n".join(lines))
    return call_text("read_file", {"file_path": str(file)})


async def proven(rig: Rig, samples: int) -> None:
    """The session gives so many samples, without a violation, every recorded token trained once."""
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == samples
    trained = sum(int(s.loss_mask.sum()) for s in finished.samples)
    assert trained == sum(len(t.output_ids) for t in rig.session.turns)


async def run(rig: Rig, harness: Harness, tmp_path: Path, *, url: str = "", window: int = 120_000) -> None:
    endpoint = Endpoint(url or rig.url, rig.opened.api_key, "policy", window, 2_000)
    result = await run_on_host(harness, endpoint, "You are ROOT. Do it.", tmp_path)
    assert harness.failure(result) == (None, ""), result.text()


def conversations(rig: Rig) -> dict[str, list[Any]]:
    """The turns of each, by the label that the client's headers give it; each goes on from the one before it."""
    found: dict[str, list[Any]] = {}
    for turn in rig.session.turns:
        found.setdefault(turn.branch, []).append(turn)
    for turns in found.values():
        assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]
    return found


@pytest.mark.parametrize("harness", [ClaudeCode(bare=False), OpenCode("anthropic")], ids=lambda h: h.name)
async def test_a_sub_agent_that_is_waited_for(make_rig: MakeRig, tmp_path: Path, harness: Harness) -> None:
    """Claude Code's starts one of its own."""
    look = f"{shell_call(harness, 'ls')}\n{shell_call(harness, 'ls -a')}"
    plans = {"ROOT": [spawn(harness, "A"), look, "Done."], "A": [look, "A is done."], "B": [look, "B is done."]}
    if nested := harness.name == "claude-code":
        plans["A"].insert(0, spawn(harness, "B"))
    rigs: list[Rig] = []
    rigs.append(await make_rig(by_name(rigs, plans)))
    await run(rigs[0], harness, tmp_path)
    found = conversations(rigs[0])
    assert [len(turns) for turns in found.values()] == ([3, 3, 2] if nested else [3, 2])
    assert [label.partition(":")[0] for label in found] == ["main", *["subagent"] * (1 + nested)]
    await proven(rigs[0], len(found))


@pytest.mark.parametrize("harness", [ClaudeCode(bare=False, background=True), Codex()], ids=lambda h: h.name)
async def test_sub_agents_that_work_beside_their_parent(make_rig: MakeRig, tmp_path: Path, harness: Harness) -> None:
    plans = {
        "ROOT": [f"{spawn(harness, 'A')}\n{spawn(harness, 'B')}", shell_call(harness, WAIT), "Done."],
        "A": [shell_call(harness, "echo > a"), "A is done."],
        "B": [shell_call(harness, "echo > b"), "B is done."],
    }
    rigs: list[Rig] = []
    rigs.append(await make_rig(by_name(rigs, plans)))
    await run(rigs[0], harness, tmp_path)
    found = conversations(rigs[0])
    assert [label.partition(":")[0] for label in found] == ["main", "subagent", "subagent"]
    assert len(found["main"]) >= 3
    await proven(rigs[0], 3)


@pytest.mark.parametrize(
    ("harness", "window", "outputs", "turns", "branches"),
    [
        pytest.param(Codex(), 262_144, [2000] * 26, 27, 1, id="codex-as-it-is"),
        pytest.param(Codex(compaction=True), 32_000, [4000, 1], 4, 3, id="codex"),
        pytest.param(OpenCode(compaction=True), 26_000, [4000, 1], 4, 3, id="opencode"),
        pytest.param(ClaudeCode(compaction=True), 24_000, [4000, 1], 4, 3, id="claude-code"),
        pytest.param(Pi(compaction=True), 24_000, [4000] * 3, 5, 3, id="pi"),
        pytest.param(QwenCode("google", compaction=True), 85_000, [4000, 1], 4, 2, id="qwen-code"),
        pytest.param(QwenCode("responses", compaction=True), 85_000, [4000, 1], 4, 3, id="qwen-code-apart"),
        pytest.param(GeminiCli(), 120_000, [8000] * 9, 10, 1, id="gemini-cli-as-it-is"),
        pytest.param(GeminiCli(compaction=True), 16_000, [4000] * 2, 3, 2, id="gemini-cli"),
    ],
)
async def test_a_long_history_is_summarised_only_where_that_is_wanted(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, window: int, outputs: list[int], turns: int, branches: int
) -> None:
    """Summarised, it is three branches: the history so far, the request for a summary, and what follows from it. Qwen
    Code's request goes on in the first where it takes the server to keep what it has read. Gemini CLI makes notes of
    old outputs instead. By itself Codex would do so here, at 245,000 tokens, and Gemini CLI at 80,000 of outputs."""
    (work := tmp_path / "work").mkdir()
    said = [long_result(harness, work, numbers) for numbers in outputs]
    rig = await make_rig(in_turn([*said, SUMMARY]), max_context=500_000)
    await run(rig, harness, tmp_path, window=window)
    assert len(rig.session.turns) == turns
    await proven(rig, branches)


async def test_a_refused_history_is_summarised(make_rig: MakeRig, tmp_path: Path) -> None:
    """The gateway's word for a full context is the one by which Claude Code compacts."""
    harness = ClaudeCode(bare=True, compaction=True)
    said = [shell_call(harness, "seq 1 3900"), shell_call(harness, "seq 1 3000"), SUMMARY]
    rig = await make_rig(in_turn(said), max_context=30_000)
    await run(rig, harness, tmp_path)
    assert [kind for kind, _ in rig.kept.events] == ["context_overflow"]
    first, second, summary, last = rig.session.turns
    assert [first.parent, second.parent, summary.parent, last.parent] == [None, first.id, first.id, None]
    await proven(rig, 3)


@pytest.mark.parametrize("wire", ["chat", "anthropic", "google"])
async def test_a_refused_history_is_not_summarised_where_that_is_not_wanted(
    make_rig: MakeRig, tmp_path: Path, wire: str
) -> None:
    """Qwen Code does so on its own when it is told that a history is too long."""
    harness = QwenCode(wire)
    rig = await make_rig(in_turn([shell_call(harness, "seq 1 3000")]), max_context=60_000)
    endpoint = Endpoint(rig.url, rig.opened.api_key, "policy", 60_000, 2_000)
    result = await run_on_host(harness, endpoint, "Do it.", tmp_path)
    assert harness.failure(result)[0] == FailureKind.CONTEXT_OVERFLOW, result.text()
    assert [kind for kind, _ in rig.kept.events] == ["context_overflow"]
    await proven(rig, 1)


@pytest.mark.parametrize(
    ("harness", "where"),
    [
        *((Pi(wire), "cut.txt") for wire in ("chat", "anthropic", "responses", "google")),
        *((harness, where) for harness in (ClaudeCode(), Codex()) for where in ("WORLD", "cut.txt")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.name}-{value.protocols[0]}",
)
async def test_an_answer_that_was_cut_on_its_way(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, where: str
) -> None:
    """The client asks again, some with what came of it: the cut turn is a branch of its own, the next one goes on."""
    write = shell_call(harness, "echo hi > cut.txt", before="I look at the WORLD now.\n")
    again = shell_call(harness, "ls -a", before="Again.\n")
    rig = await make_rig(in_turn([shell_call(harness, "ls"), thinking("hm", write), again, "Done."]))
    async with cutting(rig.url, where.encode()) as url:
        await run(rig, harness, tmp_path, url=url)
    assert not (tmp_path / "work" / "cut.txt").exists(), "half a call was run"
    first, cut, retried, last = rig.session.turns
    assert [first.parent, cut.parent, retried.parent, last.parent] == [None, first.id, first.id, retried.id]
    await proven(rig, 2)
