"""The table of docs/trainers/credit.md: two episodes under every policy, beside what counting rows gives.

`python -m support.credit_table` (in `tests/`) prints it.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from sandlot.train.advantage import Estimator
from sandlot.train.credit import Branches, CreditConfig, Weights, credit, denominator
from sandlot.train.episodes import trained_tokens
from sandlot.train.turns import token_advantages
from sandlot.trajectory.sample import Sample
from support.rows import make_row


def group() -> list[Sample]:
    """A solved in one row of 10 trained tokens; B failed in nine: three of its own conversation, six of sub-agents."""
    branches = ["main"] * 3 + [f"subagent:{k // 2}" for k in range(6)]
    nine = [
        make_row("B", index=k, branch=b, reward=0.0, turns=[(5, 4), (2, 6)], first_turn=2 * k)
        for k, b in enumerate(branches)
    ]
    return [make_row("A", turns=[(5, 4), (2, 6)]), *nine]


def naive() -> list[str]:
    """What comes out when rows are taken for episodes."""
    rows = group()
    rewards = np.asarray([row.reward for row in rows], dtype=float)
    found = []
    for name, std in (("GRPO over rows", True), ("GRPO over rows, no std", False)):
        values = rewards - rewards.mean()
        values = values / (rewards.std(ddof=1) + 1e-6) if std else values
        for weights in ("token mean", "mean of row means"):
            found.append(_line(f"naive: {name}", weights, values[0], values[1], 1 / 10, 9 / 10))
    return found


def policies() -> list[str]:
    """Every estimator, every weighting, every credit by branch."""
    found = []
    for estimator in get_args(Estimator):
        found.append(_policy(f"`{estimator}`", CreditConfig(estimator=estimator, k=2)))
    for weights in get_args(Weights):
        found.append(_policy(f"`grpo_nostd`, weights `{weights}`", CreditConfig("grpo_nostd", weights=weights)))
    for branches in get_args(Branches):
        config = CreditConfig("grpo_nostd", branches=branches, gamma=0.9)
        found.append(_policy(f"`grpo_nostd`, branches `{branches}`", config))
    return found


def _policy(name: str, config: CreditConfig) -> str:
    rewards = {"B-main-0-0": 0.2} if config.branches == "turn_rewards" else None
    samples = credit(group(), config, turn_rewards=rewards).samples
    total = denominator(samples)
    means, shares = {}, {}
    for episode in ("A", "B"):
        own = [s for s in samples if s.episode_id == episode]
        count = sum(trained_tokens(s) for s in own)
        means[episode] = sum(float(token_advantages(s).sum()) for s in own) / count
        shares[episode] = sum(s.loss_weight * trained_tokens(s) for s in own) / total
    return _line(name, f"`{config.weights}`", means["A"], means["B"], shares["A"], shares["B"])


def _line(name: str, weights: str, a: float, b: float, share_a: float, share_b: float) -> str:
    pulls = f"{a * share_a:+.3f} | {b * share_b:+.3f}"
    return f"| {name} | {weights} | {a:+.3f} | {b:+.3f} | {share_a:.0%} : {share_b:.0%} | {pulls} |"


def table() -> str:
    """The whole table in Markdown."""
    head = "| policy | weights | advantage of A | of B | share of the loss A : B | pull of A | of B |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *naive(), *policies()])


if __name__ == "__main__":
    print(table())
