"""The prompts of a run, asked again by token ids: what its journals hold are ids, not the agents' HTTP requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from sandlot.engine.base import Engine, SamplingParams
from sandlot.errors import ConfigError, ContextOverflowError, EngineError, JournalError
from sandlot.rollout.replay import Answered, Job, TryError
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.rundir import RunDir
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Turn, ids_sha256


def episodes_of(run: RunDir) -> list[tuple[str, int]]:
    """Episodes that have turns, and how many."""
    found = []
    for episode_id in run.episode_ids():
        path = run.journal_path(episode_id)
        if path.exists() and (turns := read_journal(path).turns):
            found.append((episode_id, len(turns)))
    if not found:
        raise ConfigError(f"{run.path} has no recorded turns to ask again")
    return found


def chains_of(
    run: RunDir, episode_ids: Sequence[str], engine: Engine, *, repeat: int, limit: int | None
) -> Iterator[list[Job]]:
    """A chain per episode: its turns in their order, as its agent asked them; `limit` turns in all."""
    left = limit
    counter = itertools.count()
    for _ in range(repeat):
        for episode_id in episode_ids:
            if left == 0:
                return
            jobs = _jobs(run, episode_id, engine, f"replay-{next(counter)}")
            if left is not None:
                jobs = jobs[:left]
                left -= len(jobs)
            yield jobs


def _jobs(run: RunDir, episode_id: str, engine: Engine, session_id: str) -> list[Job]:
    tree = SessionTree()
    jobs = []
    for number, turn in enumerate(read_journal(run.journal_path(episode_id)).turns):
        tree.add(turn)
        prompt = tree.ids(turn.id)[: turn.prompt_length]
        if ids_sha256(prompt) != turn.prompt_sha256:
            raise JournalError(f"{episode_id}, turn {turn.id}: the journal does not give the prompt that was sent")
        jobs.append(_job(f"{episode_id}#{number}", turn, tree, engine, session_id))
    return jobs


def _job(name: str, turn: Turn, tree: SessionTree, engine: Engine, session_id: str) -> Job:
    async def send() -> Answered:
        # Put together when it is sent: all prompts of a long session are much more than the session.
        prompt = tree.ids(turn.id)[: turn.prompt_length].tolist()
        sampling = _sampling(turn.sampling)
        try:
            done = await engine.generate(prompt, sampling, request_id=f"{session_id}-{turn.id}", session_id=session_id)
        except ContextOverflowError as error:
            raise TryError(str(error), retryable=False) from error
        except EngineError as error:
            raise TryError(str(error), retryable=error.retryable) from error
        return Answered(None, done.finish_reason, len(prompt), len(done.output_ids))

    return Job(name, "tokens", send)


def _sampling(recorded: Any) -> SamplingParams:
    known = {**recorded, "stop_token_ids": tuple(recorded.get("stop_token_ids") or ())}
    return SamplingParams(**known)
