"""A run that is gone on with at another address of its engine, and one that is not, because it is another engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sandlot.config import RunConfig, load_config
from sandlot.engine.process import EngineProcess
from sandlot.errors import ConfigError
from sandlot.rollout import run as rollouts
from sandlot.rollout.continued import expect_same_model, open_run
from sandlot.rollout.outcome import EpisodeResult
from sandlot.rollout.progress import Silent
from sandlot.trajectory.records import SealedRecord, SessionRecord
from support.tiny_agent import TinyAgent
from support.toy_model import make_toy_model

ONE, OTHER = "http://one:8000", "http://other:8000,http://another:8000"


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        ({"engine": ONE}, {"engine": OTHER}, True),
        ({"engine": OTHER}, {"engine": ONE}, True),
        ({"engine": ONE}, {"engine": "embedded"}, False),
        ({"engine": "scripted"}, {"engine": ONE}, False),
        ({"engine": "scripted"}, {"engine": "embedded"}, False),
        ({"engine": ONE}, {"engine": ONE, "engine_kind": "sglang"}, False),
        ({"engine": ONE}, {"engine": OTHER, "served_model": "an-adapter"}, False),
        ({"engine": ONE}, {"engine": OTHER, "attempts": 2}, False),
    ],
)
def test_of_an_engine_only_the_addresses_may_differ(
    tmp_path: Path, before: dict[str, object], now: dict[str, object], goes_on: bool
) -> None:
    with open_run(tmp_path, load_config(None, before)) as run:
        run.begin(SessionRecord(episode_id="e", group_id="g")).close()
    if goes_on:
        open_run(tmp_path, load_config(None, now)).close()
    else:
        with pytest.raises(ConfigError, match="another configuration"):
            open_run(tmp_path, load_config(None, now))


def test_what_was_finished_tells_the_model(tmp_path: Path) -> None:
    with open_run(tmp_path, load_config(None, {"engine": ONE})) as run:
        expect_same_model(run, "m", 100)  # nothing is finished
        for name in ("gone", "spoilt", "told"):
            header = SessionRecord(episode_id=name, group_id="g", session={"model": "m", "max_context": 100})
            with run.begin(header) as journal:
                journal.append(SealedRecord(reward=None, failure="budget"))
            run.complete(name)
        run.journal_path("gone").unlink()
        run.journal_path("spoilt").write_bytes(b"no journal at all, but as long as the head of one")
        expect_same_model(run, "m", 100)
        expect_same_model(run, "m")
        with pytest.raises(ConfigError, match="with model 'm' and the engine has 'n'"):
            expect_same_model(run, "n", 100)
        with pytest.raises(ConfigError, match="with max_context 100 and the engine has 99"):
            expect_same_model(run, "m", 99)


class Stops(Silent):
    """Ends the run at its first result."""

    running: asyncio.Task[object]

    def done(self, result: EpisodeResult) -> None:
        self.running.cancel()


@pytest.mark.slow
async def test_a_rollout_goes_on_at_another_address_with_the_same_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "chosen", lambda name, say: TinyAgent())
    toy, other = (make_toy_model(tmp_path / name) for name in ("toy", "other"))

    def config(engine: EngineProcess) -> RunConfig:
        flags = {"harness": ["tiny"], "only": ["page-count"], "attempts": 3, "concurrency": 1, "model": toy}
        return load_config(None, {**flags, "engine": engine.url})

    async with AsyncExitStack() as stack:
        first, moved, strange = [
            await stack.enter_async_context(EngineProcess(served, threads=1)) for served in (toy, toy, other)
        ]
        stops = Stops()
        stops.running = asyncio.create_task(rollouts.rollout(config(first), tmp_path / "run", progress=stops))
        with pytest.raises(asyncio.CancelledError):
            await stops.running
        await first.stop()
        with pytest.raises(ConfigError, match="with model 'toy' and the engine has 'other'"):
            await rollouts.rollout(config(strange), tmp_path / "run")
        results = await rollouts.rollout(config(moved), tmp_path / "run")
    assert [(r.failure, r.turns) for r in results] == [(None, 1)] * 3
