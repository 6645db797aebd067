"""The proof of a reward: the same patch must not earn it by the same tests inverted.

Whoever writes a report instead of earning it cannot know which of two fresh sandboxes has the real tests. Code that is
right fails the inverted ones.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from sandlot.errors import FailureKind
from sandlot.grading.invert import inverted
from sandlot.grading.names import PASSED, SKIPPED, function_of, lies_in
from sandlot.grading.verdict import Verdict
from sandlot.tasks.task import Task

Run = Callable[[bytes | None, Mapping[str, bytes]], Awaitable[Verdict]]
"""Grades the patch at hand (None) or another one, with these contents in the place of the hidden tests' own."""
Functions = Mapping[str, set[str]]
"""Names of test functions, each with the files that hold it."""


async def counterchecked(task: Task, verdict: Verdict, tests: Mapping[str, bytes], run: Run) -> Verdict:
    """`verdict`, or 0 where its tests pass, or its reward comes, whatever they assert. `tests` are the hidden ones.

    What the known solution shows too is the tests' own way (they are of a library of objects that equal everything, or
    judge without asserting), so it speaks against nobody; but what it passes must not have been skipped. Without a
    known solution assertions are negated and no more, and a reward alone, without results of tests, is no evidence.
    """
    known = task.gold_patch
    instead, functions = await asyncio.to_thread(
        inverted, tests, _meant(task), seed=secrets.token_hex(8), exact=known is None
    )
    facts: dict[str, Any] = {"functions": len(functions)}
    evidence = {**verdict.evidence, "countercheck": facts}
    if not functions:
        return replace(verdict, evidence=evidence)
    again = await run(None, instead)
    facts |= {"reward": again.reward, "detail": again.detail, "tests": dict(again.tests)}
    try:
        fault = await _fault(verdict, _kept(again), functions, run, known, instead)
    except _LostError as error:
        return replace(error.verdict, evidence=evidence)
    if fault:
        return Verdict(0.0, detail=fault, tests=verdict.tests, evidence=evidence)
    return replace(verdict, evidence=evidence)


class _LostError(Exception):
    """A run of the countercheck was lost to infrastructure, which says nothing of anybody."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


def _kept(verdict: Verdict) -> Verdict:
    if verdict.failure is FailureKind.INFRA_ERROR:
        raise _LostError(verdict)
    return verdict


async def _fault(
    verdict: Verdict,
    again: Verdict,
    functions: Functions,
    run: Run,
    known: bytes | None,
    instead: Mapping[str, bytes],
) -> str:
    """Why a reward was not earned, or nothing."""
    reward = verdict.reward or 0.0
    passes = _those(verdict, PASSED, functions) & _those(again, PASSED, functions)
    same_reward = known is not None and not verdict.tests and (again.reward or 0.0) >= reward
    if known is not None and (passes or same_reward):
        right = _kept(await run(known, instead))
        passes -= _those(right, PASSED, functions)
        same_reward = same_reward and (right.reward or 0.0) < reward
    if passes:
        return f"{min(passes)} passes with its assertions inverted too, so its result was not earned"
    if same_reward:
        return "the reward is the same with the tests' assertions inverted, so it was not earned"
    skipped = _those(verdict, SKIPPED, functions)
    if known is not None and skipped:
        skipped &= _those(_kept(await run(known, {})), PASSED, functions)
        if skipped:
            return f"{min(skipped)} was skipped, but passes with the known solution"
    return ""


def _meant(task: Task) -> frozenset[str] | None:
    """The functions that must begin to pass; None where the task names none. Others can be compared with the base."""
    names = getattr(task.grading, "fail_to_pass", None) or ()
    return frozenset(map(function_of, names)) or None


def _those(verdict: Verdict, outcome: str, functions: Functions) -> set[str]:
    """The tests of these functions that ended so."""
    ended = {name for name, became in verdict.tests.items() if became == outcome}
    return {name for name in ended if any(lies_in(name, path) for path in functions.get(function_of(name), ()))}
