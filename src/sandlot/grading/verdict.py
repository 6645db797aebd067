"""The result of grading an episode's patch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandlot.errors import FailureKind


@dataclass(frozen=True)
class Verdict:
    """Reward, or *ungraded*.

    `reward` is finite in [0, 1], or None when ungraded; then `failure` says why. `tests` maps a required test to
    what became of it (`passed`, `failed`, `error`, `skipped`, `missing`). `evidence` holds commands, exit codes, logs
    (text) and how the patch was applied: enough to see the verdict again by eye.
    """

    reward: float | None
    failure: FailureKind | None = None
    detail: str = ""
    tests: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is None:
            if self.failure is None:
                raise ValueError("an ungraded verdict needs a failure kind")
        elif not (math.isfinite(self.reward) and 0.0 <= self.reward <= 1.0):
            raise ValueError(f"a reward must be a finite number in [0, 1], not {self.reward!r}")

    @property
    def solved(self) -> bool:
        return self.reward == 1.0
