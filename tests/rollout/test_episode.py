"""One episode with everything real but the model: sandbox, agent process, gateway, capture, grading, journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import EngineError, FailureKind, GradingError
from sandlot.gateway import Session
from sandlot.rollout.episode import Episode, EpisodeRunner
from sandlot.rollout.proof import audit_run
from sandlot.rollout.run import _run_all
from sandlot.tasks import Task
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.rundir import EpisodeState
from support.passing import passes
from support.policy import ToldEngine, call_text
from support.runner import MakeRunner

pytestmark = pytest.mark.slow


def bash(command: str) -> str:
    return call_text("bash", {"command": command})


def solving(task: Task) -> list[str]:
    assert task.gold_patch is not None
    apply = f"git apply - <<'END_OF_PATCH'\n{task.gold_patch.decode()}END_OF_PATCH\n"
    return [bash(apply), bash("python3 -m pytest -q 2>&1 | tail -n 1"), "Solved."]


async def test_a_solving_episode_is_graded_audited_and_finished(make_runner: MakeRunner, task: Task) -> None:
    said = solving(task)
    runner = await make_runner(lambda prompt, number: said[number], grading={"timeout": 55})
    spec = Episode(task, "tiny", 0)
    result = await runner(spec)
    assert (result.state, result.failure, result.turns) == ("solved", None, 3)
    assert result.trained_tokens == result.sampled_tokens > 0
    assert runner.run.state(spec.id) is EpisodeState.FINISHED
    assert audit_run(runner.run).violations == []
    patch = runner.run.patch_path(spec.id).read_bytes()
    assert b"-(-len(self.items) // self.per_page)" in patch
    content = read_journal(runner.run.journal_path(spec.id))
    assert content.sealed is not None
    assert content.sealed.verdict["tests"]
    assert content.sealed.verdict["evidence"]["options"]["timeout"] == 55.0
    assert "passed" in runner.gateway.policy.format.decode(content.turns[2].new_ids.tolist())
    assert runner.gateway.sessions == {}


async def test_an_idle_episode_is_a_graded_zero(make_runner: MakeRunner, task: Task) -> None:
    runner = await make_runner(lambda prompt, number: "I do nothing.")
    result = await runner(Episode(task, "tiny", 0))
    assert (result.state, result.reward, result.failure, result.samples) == ("failed", 0.0, None, 1)


async def test_what_tests_say_need_not_be_unicode(make_runner: MakeRunner, task: Task) -> None:
    broken = "for file in $(git ls-files '*.py'); do echo 'raise ValueError(chr(0xdc80))' >$file; done"
    said = [bash(broken), "I broke it."]
    runner = await make_runner(lambda prompt, number: said[number])
    result = await runner(Episode(task, "tiny", 0))
    assert (result.state, result.failure) == ("failed", None)
    sealed = read_journal(runner.run.journal_path(f"{task.id}--tiny--0")).sealed
    assert sealed is not None
    (run,) = sealed.verdict["evidence"]["runs"]
    assert any("ValueError: ?" in text for text in run["collect_errors"].values())


@pytest.mark.parametrize(
    "left",
    [
        "cd / && rm -rf $OLDPWD",
        "cd / && rm -rf $OLDPWD && ln -s /proc $OLDPWD",
        "for n in $(seq 450); do mkdir d && cd d; done; touch x",
        "head -c 20000000 /dev/urandom | base64 >big.txt",
    ],
)
async def test_an_agent_that_leaves_nothing_to_capture_has_done_nothing(
    make_runner: MakeRunner, task: Task, left: str
) -> None:
    said = [bash(left), "Done."]
    runner = await make_runner(lambda prompt, number: said[number], retries=1)
    result = await runner(Episode(task, "tiny", 0))
    assert (result.state, result.reward, result.failure) == ("failed", 0.0, FailureKind.AGENT_ERROR)
    assert result.samples == 1
    assert "captured" in result.detail or "the patch is" in result.detail


async def test_a_spent_budget_is_still_graded(make_runner: MakeRunner, task: Task) -> None:
    said = solving(task)
    runner = await make_runner(lambda prompt, number: said[number], limits={"turns": 1})
    result = await runner(Episode(task, "tiny", 0))
    assert (result.state, result.failure, result.turns) == ("solved", FailureKind.BUDGET, 1)
    assert result.samples == 1


async def test_an_agent_that_runs_on_is_killed_before_its_diff_is_taken(make_runner: MakeRunner, task: Task) -> None:
    forever = "(setsid sh -c 'while true; do date >> clock.txt; sleep 0.1; done' &) ; sleep 600"
    runner = await make_runner(lambda prompt, number: bash(forever), limits={"wall_clock": 4.0})
    result = await runner(Episode(task, "tiny", 0))
    assert (result.failure, result.reward) == (FailureKind.AGENT_TIMEOUT, 0.0)
    assert result.samples == 1
    patch = runner.run.patch_path(f"{task.id}--tiny--0").read_bytes()
    assert b"clock.txt" in patch


async def started(runner: EpisodeRunner, spec: Episode, ready: Callable[[Session], bool]) -> tuple[Any, Session]:
    """The episode under way, and its session once it is `ready`."""
    running = asyncio.create_task(runner(spec))
    async with asyncio.timeout(60):
        while not any(ready(session) for session in runner.gateway.sessions.values()):
            assert not running.done()
            await asyncio.sleep(0.01)
    (session,) = runner.gateway.sessions.values()
    return running, session


async def test_the_end_of_its_time_ends_a_call_and_what_was_done_is_graded(make_runner: MakeRunner, task: Task) -> None:
    said = solving(task)

    def say(prompt: list[int], number: int) -> str:
        engine.hold = number == 0  # the call after the first turn stays at the engine
        return said[number]

    runner = await make_runner(say, limits={"wall_clock": 1000.0})
    engine = runner.gateway._engine._engine
    assert isinstance(engine, ToldEngine)
    running, session = await started(runner, Episode(task, "tiny", 0), lambda _: len(engine.prompts) == 2)
    passes(session.clock, 1000.0)
    result = await running
    assert (result.state, result.failure, result.turns) == ("solved", FailureKind.BUDGET, 1)
    assert "wall clock (1000 s)" in result.detail
    assert engine.aborted == result.samples == 1
    assert audit_run(runner.run).violations == []


@pytest.mark.parametrize("ends", [True, False])
async def test_a_paused_engine_costs_the_agent_no_time(make_runner: MakeRunner, task: Task, ends: bool) -> None:
    said = solving(task)
    runner = await make_runner(lambda prompt, number: said[number], limits={"wall_clock": 1000.0})
    await runner.gateway.pause()
    running, session = await started(runner, Episode(task, "tiny", 0), lambda session: session.clock._held > 0)
    if ends:
        passes(session.clock, 999.0)
        runner.gateway.resume()
        result = await running
        assert (result.state, result.failure, result.turns) == ("solved", None, 3)
    else:
        passes(session.clock, 2000.0)
        result = await running
        assert (result.failure, result.reward, result.samples) == (FailureKind.INFRA_ERROR, None, 0)
        assert "did not serve" in result.detail
        runner.gateway.resume()
    row = runner.run.result(result.episode_id)
    assert row is not None
    assert row["metadata"]["unserved_seconds"] >= 999.0


async def test_an_engine_that_dies_is_nobodys_zero(make_runner: MakeRunner, task: Task) -> None:
    def say(prompt: list[int], number: int) -> str | BaseException:
        return bash("ls") if number == 0 else EngineError("the engine is down")

    runner = await make_runner(say)
    result = await runner(Episode(task, "tiny", 0))
    assert (result.failure, result.reward, result.samples) == (FailureKind.INFRA_ERROR, None, 0)
    assert result.turns == 1


async def test_a_stream_that_breaks_is_no_ordinary_end(
    make_runner: MakeRunner, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent sees a broken reply and exits 0, with a diff that is empty."""
    from sandlot.gateway.wire.openai_chat import ChatWire
    from support.tiny_agent import TinyAgent

    def broken(*_: object) -> bytes:
        raise ConnectionResetError("the link to the sandbox broke")

    monkeypatch.setattr(ChatWire, "body", broken)
    runner = await make_runner(lambda prompt, number: bash("ls"), agent=TinyAgent(exit_on_error=0))
    result = await runner(Episode(task, "tiny", 0))
    assert (result.failure, result.reward, result.samples) == (FailureKind.INFRA_ERROR, None, 0)


async def test_what_infrastructure_lost_is_tried_again_and_the_first_try_set_aside(
    make_runner: MakeRunner, task: Task, tmp_path: Path
) -> None:
    said = [EngineError("down"), *solving(task)]
    runner = await make_runner(lambda prompt, number: said[number], retries=1)
    result = await runner(Episode(task, "tiny", 0))
    assert result.state == "solved"
    names = sorted(p.name for p in (tmp_path / "run" / "episodes").iterdir())
    assert names == [f"{task.id}--tiny--0.1.aborted.jsonl.gz", f"{task.id}--tiny--0.jsonl.gz"]


@dataclass(frozen=True)
class Faulty(EpisodeRunner):
    """Attempt 5 raises after it ran, 6 is cancelled by a library inside, 7 cannot be graded."""

    async def _agent(self, spec, sandbox, session: Session, api_key: str):  # type: ignore[no-untyped-def]
        result = await super()._agent(spec, sandbox, session, api_key)
        if spec.attempt == 5:
            raise ValueError("a bug in the export\udc80")
        if spec.attempt == 6:
            raise asyncio.CancelledError
        if spec.attempt == 7:
            raise GradingError("the grader broke")
        return result


async def test_one_broken_episode_does_not_touch_its_group(make_runner: MakeRunner, task: Task) -> None:
    runner = await make_runner(lambda prompt, number: "Nothing to do.", kind=Faulty, max_infra_share=1.0)
    await _run_all(runner, [Episode(task, "tiny", n) for n in range(8)])
    results = {row["episode_id"][-1]: row for row in runner.run.results()}
    assert len(results) == 8
    assert [results[str(n)]["failure"] for n in range(5)] == [None] * 5
    assert [results[str(n)]["failure"] for n in (5, 6, 7)] == ["infra_error", "infra_error", "grader_error"]
    assert "a bug in the export\\udc80" in results["5"]["metadata"]["detail"]
    assert [results[str(n)]["reward"] for n in (5, 6, 7)] == [None] * 3
    assert [results[str(n)]["samples"] for n in (5, 6)] == [0, 0]
    assert audit_run(runner.run).violations == []


async def test_a_real_cancellation_ends_all_quickly_and_leaves_nothing(make_runner: MakeRunner, task: Task) -> None:
    runner = await make_runner(lambda prompt, number: bash("sleep 300"))
    running = asyncio.create_task(_run_all(runner, [Episode(task, "tiny", n) for n in range(3)]))
    async with asyncio.timeout(60):
        while len(runner.gateway.sessions) < 3 or not all(s.turns for s in runner.gateway.sessions.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    running.cancel()
    async with asyncio.timeout(15):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert runner.gateway.sessions == {}
    assert [runner.run.state(f"{task.id}--tiny--{n}") for n in range(3)] == [EpisodeState.UNSEALED] * 3


async def test_a_run_that_only_loses_episodes_stops_and_says_why(make_runner: MakeRunner, task: Task) -> None:
    from sandlot.errors import SandlotError

    runner = await make_runner(lambda prompt, number: EngineError("no such model here"), concurrency=4)
    with pytest.raises(SandlotError, match=r"lost to infrastructure.*no such model here"):
        await _run_all(runner, [Episode(task, "tiny", n) for n in range(20)])
    assert len(list(runner.run.results())) < 20
