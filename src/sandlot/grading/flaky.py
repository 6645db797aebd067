"""The rule for flaky tests: an unsolved verdict may be graded again, and what most of the runs say counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from sandlot.grading.verdict import Verdict


async def repeated(run: Callable[[], Awaitable[Verdict]], reruns: int) -> Verdict:
    """The verdict of a first run, or of the majority of up to `1 + reruns` runs where that one was not solved.

    Each run has a sandbox of its own and changes nothing. A tie is unsolved. Runs that came to no verdict do not count,
    and a first run without one is never repeated: nothing failed there. The evidence of the verdict that counts lists
    all runs, and the tests whose results differed.
    """
    first = await run()
    if reruns <= 0 or first.reward is None or first.solved:
        return first
    runs, graded = [first], [first]
    while len(runs) <= reruns and not _decided(graded, 1 + reruns - len(runs)):
        again = await run()
        runs.append(again)
        if again.reward is not None:
            graded.append(again)
    solved = [verdict for verdict in graded if verdict.solved]
    chosen = solved[0] if 2 * len(solved) > len(graded) else first
    names = {name for verdict in graded for name in verdict.tests}
    flaky = sorted(name for name in names if len({verdict.tests.get(name) for verdict in graded}) > 1)
    listed = [{"reward": v.reward, "detail": v.detail, "tests": dict(v.tests)} for v in runs]
    return replace(chosen, evidence={**chosen.evidence, "reruns": listed, "flaky": flaky})


def _decided(graded: list[Verdict], left: int) -> bool:
    """Whether the runs that are left cannot change the majority."""
    solved = sum(verdict.solved for verdict in graded)
    unsolved = len(graded) - solved
    return unsolved >= solved + left or solved > unsolved + left
