"""What an episode came to: decided from the gateway's own record first, then from what the agent said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandlot.errors import FailureKind


@dataclass(frozen=True)
class Evidence:
    """What is known when the agent has ended. `last_delivered`: the newest turn of its main conversation
    reached the agent whole."""

    turns: int
    last_delivered: bool
    engine_error: str
    stopped_by: str
    harness_failure: FailureKind | None
    harness_detail: str


def failure_of(seen: Evidence) -> tuple[FailureKind | None, str]:
    """The failure kind of an ended agent run, and why. None is an ordinary end, solved or not.

    An engine that failed last, a turn that never arrived, or no turn at all are the infrastructure's doing,
    whatever exit code the agent found for them.
    """
    if seen.stopped_by == "context":
        if seen.turns == 0:
            return FailureKind.CONTEXT_OVERFLOW, "the agent's first prompt is longer than the model's context"
        if seen.harness_failure is not None:
            return FailureKind.CONTEXT_OVERFLOW, "the conversation outgrew the model's context"
    if seen.engine_error:
        return FailureKind.INFRA_ERROR, f"the engine failed last: {seen.engine_error}"
    if seen.stopped_by and seen.stopped_by != "context":
        return FailureKind.BUDGET, f"budget spent: {seen.stopped_by}"
    if seen.harness_failure is FailureKind.AGENT_TIMEOUT:
        return seen.harness_failure, seen.harness_detail
    if seen.turns == 0:
        detail = f": {seen.harness_detail}" if seen.harness_detail else ""
        return FailureKind.INFRA_ERROR, f"the agent ended without one complete turn{detail}"
    if not seen.last_delivered:
        return FailureKind.INFRA_ERROR, "the last turn never reached the agent whole"
    return seen.harness_failure, seen.harness_detail


@dataclass(frozen=True)
class EpisodeResult:
    """A finished episode as its row in `results.jsonl` tells it. Times in seconds; `reward` None is ungraded."""

    episode_id: str
    task: str
    harness: str
    reward: float | None
    failure: FailureKind | None = None
    detail: str = ""
    turns: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    samples: int = 0
    forks: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def solved(self) -> bool:
        return self.reward == 1.0

    @property
    def state(self) -> str:
        """`solved`, `failed` or `ungraded`."""
        return "solved" if self.solved else "ungraded" if self.reward is None else "failed"

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> EpisodeResult:
        facts = row["metadata"]
        return cls(
            episode_id=row["episode_id"],
            task=facts.get("task", ""),
            harness=facts.get("harness", ""),
            reward=row["reward"],
            failure=FailureKind(row["failure"]) if row["failure"] else None,
            detail="; ".join(row["violations"][:1]) or facts.get("detail", ""),
            turns=row["turns"],
            sampled_tokens=row["sampled_tokens"],
            trained_tokens=row["trained_tokens"],
            samples=row["samples"],
            forks=row["forks"],
            seconds=facts.get("seconds", {}),
        )
