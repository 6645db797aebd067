"""The audit of a whole run, and the re-scoring of its samples by an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandlot.errors import AuditError, SandlotError
from sandlot.rollout.policy import engine_at
from sandlot.trajectory.audit import AuditReport, Violation
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.rundir import EpisodeState, RunDir
from sandlot.trajectory.sample import Sample, Span

Tick = Callable[[int, int], None]
"""Told after each step how many are done, and of how many."""


UNREADABLE = "unreadable"
"""Kind of the violation of an episode whose journal or samples cannot be read."""


@dataclass
class RunAudit:
    """What was proven over all finished episodes. Counts of episodes, turns, tokens, samples."""

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("episodes", "unfinished", "turns", "sampled_tokens", "trained_tokens", "samples", "forks", "undelivered"),
            0,
        )
    )
    violations: list[tuple[str, Violation]] = field(default_factory=list)

    @property
    def unreadable(self) -> dict[str, str]:
        """By episode of which nothing can be proven: why, and the cure."""
        return {episode_id: v.detail for episode_id, v in self.violations if v.kind == UNREADABLE}

    def raise_for_violations(self) -> None:
        """`AuditError` with the count and the first violation, if there is one in what could be read."""
        if broken := [(episode_id, v) for episode_id, v in self.violations if v.kind != UNREADABLE]:
            episode_id, first = broken[0]
            raise AuditError(f"the audit found {len(broken)} violations; the first, in {episode_id}: {first}")

    def as_dict(self) -> dict[str, Any]:
        listed = [{"episode_id": e, "text": str(v)} for e, v in self.violations]
        return {**self.counts, "violations": listed}

    def add(self, episode_id: str, report: AuditReport) -> None:
        """Count what was proven of an episode."""
        counted = {
            "episodes": 1,
            "turns": report.turns,
            "sampled_tokens": report.sampled,
            "trained_tokens": report.trained,
            "samples": report.samples,
            "forks": report.forks,
            "undelivered": report.undelivered,
        }
        for name, count in counted.items():
            self.counts[name] += count
        self.violations += [(episode_id, violation) for violation in report.violations]


def audit_run(run: RunDir, tick: Tick | None = None) -> RunAudit:
    """Prove the stored samples of every finished episode against its journal.

    An episode that cannot be read is a violation of its own and hides no other.
    """
    found = RunAudit()
    episode_ids = run.episode_ids()
    for number, episode_id in enumerate(episode_ids, 1):
        try:
            if run.state(episode_id) is EpisodeState.FINISHED:
                found.add(episode_id, run.audit(episode_id))
            else:
                found.counts["unfinished"] += 1
        except (SandlotError, OSError) as error:
            found.violations.append((episode_id, Violation(UNREADABLE, detail=_told(error))))
        if tick is not None:
            tick(number, len(episode_ids))
    return found


def _told(error: SandlotError | OSError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    what = f"{error.filename or 'its journal or its samples'} cannot be read ({error.strerror or error})"
    return f"{what}; restore it from a copy, or let it be read"


@dataclass(frozen=True)
class Gap:
    """|recorded - re-scored| logprob over trained tokens; `skipped` were sampled at a temperature other than 1 or
    truncated, where a plain score is another distribution."""

    tokens: int
    largest: float
    mean: float
    skipped: int

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "largest": self.largest, "mean": self.mean, "skipped": self.skipped}


async def rescore_run(
    run: RunDir, url: str, tick: Tick | None = None, *, kind: str = "vllm", without: Collection[str] = ()
) -> Gap:
    """Let the engine at `url`, which speaks `kind`, score every sample again and compare the trained tokens.

    `without` names episodes that cannot be read.
    """
    engine = engine_at(url, kind)
    gaps: list[np.ndarray[Any, Any]] = []
    skipped = 0
    episode_ids = [episode_id for episode_id in run.finished() if episode_id not in without]
    try:
        for number, episode_id in enumerate(episode_ids, 1):
            for sample, spans in _plainly_sampled(run, episode_id):
                skipped += sum(span.length for span in sample.spans) - sum(span.length for span in spans)
                if spans:
                    scores = np.asarray([0.0, *await engine.score(sample.tokens.tolist())])
                    for span in spans:
                        place = slice(span.start, span.start + span.length)
                        gaps.append(np.abs(scores[place] - sample.logprobs[place]))
            if tick is not None:
                tick(number, len(episode_ids))
    finally:
        await engine.close()
    joined = np.concatenate(gaps) if gaps else np.zeros(0)
    largest, mean = (float(joined.max()), float(joined.mean())) if len(joined) else (0.0, 0.0)
    return Gap(len(joined), largest, mean, skipped)


def _plainly_sampled(run: RunDir, episode_id: str) -> Iterator[tuple[Sample, list[Span]]]:
    """The samples of an episode, each with its spans whose distribution was the model's own."""
    plain = {
        turn.id
        for turn in read_journal(run.journal_path(episode_id)).turns
        if turn.sampling.get("temperature") == 1.0
        and turn.sampling.get("top_p") == 1.0
        and turn.sampling.get("top_k") in (-1, 0)
    }
    for sample in run.samples_of(episode_id):
        yield sample, [span for span in sample.spans if span.turn_id in plain]


def rescore(
    run: RunDir, url: str, tick: Tick | None = None, *, kind: str = "vllm", without: Collection[str] = ()
) -> Gap:
    """`rescore_run` for callers without an event loop."""
    return asyncio.run(rescore_run(run, url, tick, kind=kind, without=without))
