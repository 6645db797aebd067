"""Real agent CLIs against a served gateway, in every dialect they speak: one branch, one sample, nothing lost."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from sandlot.errors import EngineError, FailureKind
from sandlot.gateway import SessionLimits
from sandlot.harness import Command, Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.codex import Codex
from sandlot.harness.gemini_cli import GeminiCli
from sandlot.harness.mini_swe_agent import MiniSweAgent
from sandlot.harness.opencode import OpenCode
from sandlot.harness.pi import Pi
from sandlot.harness.qwen_code import QwenCode
from sandlot.sandbox import ExecResult, Layer, Sandbox
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.rundir import RunDir
from support import engines
from support.gateway_process import Served, gateway_process
from support.host_cli import run_on_host
from support.policy import call_text
from support.rig import MakeRig, Rig
from support.told_agents import broken_call, farewell, in_turn, shell_call, thinking
from support.toy_model import make_toy_model

pytestmark = [pytest.mark.npm, pytest.mark.slow]

WIRES = ("chat", "anthropic", "responses", "google")


def told_apart(*harnesses: Harness) -> list[Any]:
    """Parameters named by CLI and wire."""
    return [pytest.param(harness, id=f"{harness.name}-{harness.protocols[0]}") for harness in harnesses]


MINI = told_apart(*(MiniSweAgent(wire) for wire in ("chat", "anthropic", "google")))
DROPPING = [*told_apart(QwenCode("anthropic")), *MINI]
"""Those that do not keep a call which they cannot read; the last two drop it alike."""
AGENTS = [
    *told_apart(*(Pi(wire) for wire in WIRES), ClaudeCode(), Codex(), GeminiCli()),
    *told_apart(*(OpenCode(wire) for wire in WIRES), *(QwenCode(wire) for wire in WIRES)),
    pytest.param(Codex(as_model="gpt-5.5"), id="codex-as-gpt"),
    *MINI,
]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAIAAAACUFjqAAAAEklEQVR4nGP4z8CAB+GTG8HSALfKY52fTcuYAAAAAElFTkSuQmCC"
)
ENDING: list[Any] = [
    pytest.param(harness, id=harness.name) for harness in (Codex(), OpenCode(), QwenCode(), GeminiCli(), MiniSweAgent())
]


def statement(agent: str) -> str:
    """The task of an agent, by which the scripted engine knows whose turn it is."""
    return f"Write hello.txt. You are {agent}."


def script(agent: str, harness: Harness) -> dict[str, Any]:
    """What the policy does as this agent: two calls at once, and two that cannot be run if it keeps such ones."""

    def bash(command: str) -> dict[str, Any]:
        return {"tool": "bash", "arguments": {"command": command}}

    bad = [{"text": call_text("no_such_tool", {"a": 1})}, {"text": broken_call(harness, before="A broken call.\n")}]
    steps = [
        {"reasoning": "First I write.", "text": "I write.\n", "calls": [bash("echo hi > hello.txt")]},
        {"calls": [bash("cat hello.txt"), bash("ls -a")]},
        *([] if dropping(agent) else bad),
        {"reasoning": "I look.", "calls": [bash("printf 'caf\u00e9'")]},
        {"text": "  All done.\n\n"},
    ]
    return {"match": statement(agent), "steps": steps}


def dropping(agent: str) -> bool:
    return agent in {parameter.id for parameter in DROPPING}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """`sandlot gateway` with two workers, over the scripted engine that has a script for each agent."""
    scratch = tmp_path_factory.mktemp("gateway")
    model = make_toy_model(scratch / "toy")
    scripts = [script(str(agent.id), agent.values[0]) for agent in AGENTS]
    async with engines.scripted(model, {"scripts": scripts}, scratch) as url:
        with gateway_process(scratch, model, url, workers=2) as served:
            yield served


async def _run(
    rig: Rig, harness: Harness, tmp_path: Path, *, base: str | None = None, prompt: str = "Write hello.txt."
) -> ExecResult:
    endpoint = Endpoint(base or rig.url, rig.opened.api_key, "policy", 120_000, 8_000)
    return await run_on_host(harness, endpoint, prompt, tmp_path)


@pytest.mark.parametrize("harness", AGENTS)
async def test_a_task_with_parallel_and_bad_calls_is_one_branch(
    gateway: Served, tmp_path: Path, harness: Harness, request: pytest.FixtureRequest
) -> None:
    agent = request.node.callspec.id
    session, key = gateway.open()
    endpoint = Endpoint(gateway.base_url, key, "policy", 120_000, 8_000)
    result = await run_on_host(harness, endpoint, statement(agent), tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    state = gateway.control("GET", f"/control/sessions/{session}").json()
    ends_by_a_call = harness.name == "mini-swe-agent"
    bad = {} if dropping(agent) else {"invalid_arguments": 1, "unknown_tool": 1}
    assert state["calls"] == {"ok": 4 + ends_by_a_call, **bad}
    assert state["forks"] == []
    finished = gateway.control("POST", f"/control/sessions/{session}/finish", {}).json()
    assert finished["audit"]["violations"] == []
    (sample,) = finished["samples"]
    turns = read_journal(RunDir.read(gateway.run).journal_path(session)).turns
    assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]
    assert len(turns) == 4 + len(bad)
    assert sum(sample["loss_mask"]) == sum(len(t.output_ids) for t in turns)


@pytest.mark.parametrize("harness", DROPPING[:2])
async def test_a_turn_that_is_dropped_is_a_branch_of_its_own(
    make_rig: MakeRig, tmp_path: Path, harness: Harness
) -> None:
    """mini-SWE-agent tells the error to a history without the call; Qwen Code asks the same again."""
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
    mini = harness.name == "mini-swe-agent"
    assert rig.session.counters.calls == {"ok": 4 + mini, "invalid_arguments": 1, "unknown_tool": 1}
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, *(turns[k].id for k in ((0, 1, 1, 1, 4) if mini else (0, 1, 2, 2, 4)))]
    assert len(rig.session.forks) == 1 + mini
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == 2 + mini


async def test_calls_that_the_client_runs_in_a_form_of_its_own(make_rig: MakeRig, tmp_path: Path) -> None:
    """What Claude Code fills in, renames and leaves out before it runs a call is in its history from then on."""
    work = tmp_path / "work"
    said = [
        call_text("Bash", {"command": f"cd {work} && printf 'a\\nb\\n' > a.txt && find . -exec ls {{}} \\\\;"}),
        call_text("Read", {"file_path": f"{work}/a.txt", "offset": "1"}),
        call_text("Edit", {"file_path": f"{work}/a.txt", "old_string": "a", "new_string": "c  "}),
        call_text(
            "Edit", f'{{"file_path": "{work}/a.txt", "old_str": "c", "new_str": "d", "n": 12345678901234567890}}'
        ),
        "Done.",
    ]
    rig = await make_rig(in_turn(said))
    result = await _run(rig, ClaudeCode(), tmp_path)
    assert ClaudeCode().failure(result) == (None, ""), result.text()
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]
    assert rig.session.forks == []
    assert (work / "a.txt").read_text() == "c\nb\n"


@dataclass
class AsItComes:
    """An agent that is told where its model is, and nothing else; `again` goes on with the session before."""

    harness: Harness
    again: bool = False
    protocols: tuple[str, ...] = ()
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.name = self.harness.name

    def layers(self) -> tuple[Layer, ...]:
        return self.harness.layers()

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None: ...

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        program, *_ = [arg for arg in self.harness.command(prompt, endpoint).argv if arg.endswith(("claude", "/codex"))]
        if self.name == "claude-code":
            env = {"ANTHROPIC_BASE_URL": endpoint.base_url, "ANTHROPIC_API_KEY": endpoint.api_key, "IS_SANDBOX": "1"}
            env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
            argv = [program, "-p", "--dangerously-skip-permissions", *(["-c"] if self.again else [])]
            return Command(tuple(argv), env, prompt.encode())
        provider = f'{{name="g",base_url="{endpoint.base_url}/v1",env_key="KEY",wire_api="responses"}}'
        argv = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        argv += ["-c", 'model_provider="g"', "-c", f"model_providers.g={provider}", "-m", "gpt-5.5"]
        argv += ["--disable", "plugins", "--disable", "apps", *(["resume", "--last"] if self.again else []), "-"]
        return Command(tuple(argv), {"KEY": endpoint.api_key}, prompt.encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        return self.harness.failure(result)


@pytest.mark.parametrize("harness", [ClaudeCode(), Codex()], ids=lambda harness: harness.name)
async def test_an_agent_as_it_comes_goes_on_in_one_branch(make_rig: MakeRig, tmp_path: Path, harness: Harness) -> None:
    """Its own caching, betas and requests are left on, and a second process resumes it."""
    said = [
        thinking("First I write.", shell_call(harness, "echo hi > hello.txt", before="I write.\n")),
        shell_call(harness, "cat hello.txt") + "\n" + shell_call(harness, "ls -a"),
        call_text("no_such_tool", {"a": 1}) + "\n" + broken_call(harness),
        "First done.",
        shell_call(harness, "printf 'caf\u00e9'"),
        "Done.",
    ]
    rig = await make_rig(in_turn(said))
    for again in (False, True):
        agent = AsItComes(harness, again)
        result = await _run(rig, agent, tmp_path)
        assert agent.failure(result) == (None, ""), result.text()
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]
    assert len(turns) == len(said)
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rig], None]:
    """Makes the engine of a rig wait until its first stream has had three no-op events."""

    def hold(rig: Rig) -> None:
        rig.engine.hold, written, write = True, 0, web.StreamResponse.write

        async def counting(response: web.StreamResponse, data: bytes) -> None:
            nonlocal written
            await write(response, data)
            written += 1
            if written == 1 + 3:
                rig.engine.release.set()

        monkeypatch.setattr(web.StreamResponse, "write", counting)

    return hold


@pytest.mark.parametrize("harness", [pytest.param(Pi(wire), id=f"pi-{wire}") for wire in WIRES])
async def test_a_session_in_the_path_and_a_slow_engine(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, slow: Callable[[Rig], None]
) -> None:
    rig = await make_rig(in_turn([shell_call(harness, "echo hi > hello.txt"), "Done."]))
    slow(rig)
    result = await _run(rig, harness, tmp_path, base=f"{rig.url}/s/{rig.session.id}")
    assert harness.failure(result) == (None, ""), result.text()
    assert len(rig.session.turns) == 2


@pytest.mark.parametrize(
    ("harness", "in_stream"),
    [
        pytest.param(Pi(), False, id="pi-at-once"),
        pytest.param(Codex(), False, id="codex-at-once"),
        *(pytest.param(h, True, id=f"{h.name}-in-the-stream") for h in (Pi("google"), ClaudeCode(), Codex())),
    ],
)
async def test_an_engine_that_failed_is_asked_again(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, in_stream: bool, slow: Callable[[Rig], None]
) -> None:
    """Told so before anything was answered, or in a stream that had begun: the failed call leaves nothing."""
    failed = EngineError("the engine is being restarted")
    said = [failed, shell_call(harness, "echo hi >> hello.txt"), "Done."]
    rig = await make_rig(lambda prompt, number: said[min(number, 2)])
    if in_stream:
        slow(rig)
    result = await _run(rig, harness, tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    first, second = rig.session.turns
    assert (first.parent, second.parent, rig.session.forks) == (None, first.id, [])
    assert [kind for kind, _ in rig.kept.events] == ["engine_error"]


@pytest.mark.parametrize(
    ("harness", "tool", "field"),
    [(ClaudeCode(), "Read", "file_path"), (Codex(as_model="gpt-5.5"), "view_image", "path")],
)
async def test_an_image_is_left_out_with_a_note(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, tool: str, field: str, slow: Callable[[Rig], None]
) -> None:
    image = tmp_path / "work" / "a.png"
    image.parent.mkdir()
    image.write_bytes(PNG)
    look = call_text(tool, {field: str(image)}) + "\n" + shell_call(harness, "ls")
    rig = await make_rig(in_turn([look, shell_call(harness, "ls -a"), "Done."]))
    slow(rig)
    result = await _run(rig, harness, tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    assert "image left out: this model reads text only" in rig.engine.fmt.tokenizer.decode(rig.engine.prompts[1])
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, turns[0].id, turns[1].id]


@pytest.mark.parametrize(
    ("harness", "tool"),
    [
        pytest.param(ClaudeCode(bare=False), "WebSearch", id="claude-code"),
        pytest.param(GeminiCli(), "google_web_search", id="gemini-cli"),
    ],
)
async def test_a_search_that_the_vendor_runs_is_not_offered(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, tool: str
) -> None:
    """The client would ask the policy for the results, which it could only make up."""
    rig = await make_rig(in_turn([call_text(tool, {"query": "what is it"}), "Done."]))
    result = await _run(rig, harness, tmp_path)
    assert harness.failure(result) == (None, ""), result.text()
    first, second = rig.session.turns
    assert (second.parent, rig.session.counters.calls) == (first.id, {"unknown_tool": 1})


@pytest.mark.parametrize("harness", ENDING)
async def test_the_statement_arrives_whole_and_a_spent_budget_ends_it(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, slow: Callable[[Rig], None]
) -> None:
    """What a shell, a parser or the CLI itself would take for its own, and more than an argument holds."""
    statement = "/help me with - a dash, @app.route('/a b'), $HOME, `cmd`, café\n\n  indented\n" + "word " * 30_000
    rig = await make_rig(
        in_turn([shell_call(harness, "echo hi >> hello.txt")]), limits=SessionLimits(turns=1), max_context=500_000
    )
    if harness.name != "mini-swe-agent":  # the only one that streams nothing
        slow(rig)
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
