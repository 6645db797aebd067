"""From results to one number: all or nothing, a fraction, or a weighted mean of several rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandlot.errors import GradingError
from sandlot.grading.names import PASSED
from sandlot.grading.verdict import Verdict
from sandlot.tasks.task import GradingOptions


def verdict_of_tests(
    options: GradingOptions,
    tests: Mapping[str, str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    evidence: dict[str, Any],
    fault: str = "",
) -> Verdict:
    """The verdict on required tests. `fault` says why the run as a whole earns nothing, whatever they say."""
    shares = {"fail_to_pass": _share(tests, fail_to_pass), "pass_to_pass": _share(tests, pass_to_pass)}
    evidence["rewards"] = shares
    if fault:
        return Verdict(0.0, detail=fault, tests=tests, evidence=evidence)
    not_passed = [name for name, outcome in tests.items() if outcome != PASSED]
    if not not_passed:
        return Verdict(1.0, tests=tests, evidence=evidence)
    detail = f"{len(not_passed)} of {len(tests)} required tests did not pass"
    partial = options.credit == "fraction" and shares["pass_to_pass"] == 1.0
    return Verdict(shares["fail_to_pass"] if partial else 0.0, detail=detail, tests=tests, evidence=evidence)


def _share(tests: Mapping[str, str], names: Sequence[str]) -> float:
    return sum(tests.get(name) == PASSED for name in names) / len(names) if names else 1.0


def weighted(options: GradingOptions, rewards: Mapping[str, float]) -> float:
    """One number from a verifier's rewards: by the weights, else the one called `reward`, else the only one."""
    if options.weights:
        if missing := sorted(set(options.weights) - set(rewards)):
            raise GradingError(f"the verifier gave no reward called {missing[0]!r}, which has a weight")
        total = sum(options.weights.values())
        return min(1.0, sum(weight * rewards[name] for name, weight in options.weights.items()) / total)
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise GradingError(f"the verifier gave the rewards {', '.join(sorted(rewards))}: say their weights in the options")
