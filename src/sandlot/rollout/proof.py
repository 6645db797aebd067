"""The audit of a whole run, and the re-scoring of its samples by an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandlot.errors import AuditError, JournalError, SandlotError
from sandlot.rollout.policy import engine_at
from sandlot.trajectory.audit import Violation
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.rundir import EpisodeState, RunDir

Tick = Callable[[int, int], None]
"""Told after each step how many are done, and of how many."""


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

    def raise_for_violations(self) -> None:
        """`AuditError` with the count and the first violation, if there is one."""
        if self.violations:
            episode_id, first = self.violations[0]
            raise AuditError(f"the audit found {len(self.violations)} violations; the first, in {episode_id}: {first}")

    def as_dict(self) -> dict[str, Any]:
        listed = [{"episode_id": e, "text": str(v)} for e, v in self.violations]
        return {**self.counts, "violations": listed}


def audit_run(run: RunDir, tick: Tick | None = None) -> RunAudit:
    """Prove the stored samples of every finished episode against its journal."""
    found = RunAudit()
    episode_ids = run.episode_ids()
    for number, episode_id in enumerate(episode_ids, 1):
        if run.state(episode_id) is not EpisodeState.FINISHED:
            found.counts["unfinished"] += 1
            continue
        try:
            report = run.audit(episode_id)
        except FileNotFoundError:
            found.violations.append((episode_id, Violation("journal", detail="it is missing; restore it from a copy")))
            continue
        except SandlotError as error:
            kind = "journal" if isinstance(error, JournalError) else "samples"
            found.violations.append((episode_id, Violation(kind, detail=str(error))))
            continue
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
            found.counts[name] += count
        found.violations += [(episode_id, violation) for violation in report.violations]
        if tick is not None:
            tick(number, len(episode_ids))
    return found


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


async def rescore_run(run: RunDir, url: str, tick: Tick | None = None, *, kind: str = "vllm") -> Gap:
    """Let the engine at `url`, which speaks `kind`, score every sample again and compare the trained tokens."""
    engine = engine_at(url, kind)
    gaps: list[np.ndarray[Any, Any]] = []
    skipped = 0
    samples = list(run.samples())
    plain = {
        turn.id: turn.sampling.get("temperature") == 1.0
        and turn.sampling.get("top_p") == 1.0
        and turn.sampling.get("top_k") in (-1, 0)
        for episode_id in {s.episode_id for s in samples}
        for turn in read_journal(run.journal_path(episode_id)).turns
    }
    try:
        for number, sample in enumerate(samples, 1):
            spans = [span for span in sample.spans if plain[span.turn_id]]
            skipped += sum(span.length for span in sample.spans) - sum(span.length for span in spans)
            if spans:
                scores = np.asarray([0.0, *await engine.score(sample.tokens.tolist())])
                for span in spans:
                    place = slice(span.start, span.start + span.length)
                    gaps.append(np.abs(scores[place] - sample.logprobs[place]))
            if tick is not None:
                tick(number, len(samples))
    finally:
        await engine.close()
    joined = np.concatenate(gaps) if gaps else np.zeros(0)
    largest, mean = (float(joined.max()), float(joined.mean())) if len(joined) else (0.0, 0.0)
    return Gap(len(joined), largest, mean, skipped)


def rescore(run: RunDir, url: str, tick: Tick | None = None, *, kind: str = "vllm") -> Gap:
    """`rescore_run` for callers without an event loop."""
    return asyncio.run(rescore_run(run, url, tick, kind=kind))
