"""Sending recorded work again and measuring it: some at once, failures that may pass repeated, everything counted."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandlot.errors import SandlotError

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 15.0
_LONGEST_ASKED_S = 120.0
"""The longest `Retry-After` that is kept; a server that asks for more is asked again after this."""


@dataclass(frozen=True)
class Answered:
    """A complete answer: tokens as the server counts them, `first_s` until the first content of a stream."""

    status: int | None
    finish: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    first_s: float | None = None


class TryError(Exception):
    """One try failed. `after_s` is how long the server asks to wait before the next."""

    def __init__(
        self, message: str, *, retryable: bool, status: int | None = None, after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable, self.status, self.after_s = retryable, status, after_s


@dataclass(frozen=True)
class Job:
    """One recorded request: where it stands, its kind, and how to send it."""

    name: str
    kind: str
    send: Callable[[], Awaitable[Answered]]


@dataclass(frozen=True)
class Result:
    """What became of a job. Times in seconds: `started_s` since the beginning, `latency_s` of the last try alone."""

    number: int
    name: str
    kind: str
    ok: bool
    tries: int
    started_s: float
    latency_s: float
    status: int | None = None
    finish: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    first_s: float | None = None
    error: str = ""


async def replay(
    chains: Iterable[Sequence[Job]],
    *,
    concurrency: int,
    retries: int,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Work through `chains`, `concurrency` of them at once; the jobs of a chain go one after another.

    Results are in the order of the jobs. A job that fails does not stop the others of its chain.
    """
    results: list[Result] = []
    waiting = iter(chains)
    numbers = iter(range(1 << 62))
    begin = time.monotonic()

    async def worker() -> None:
        for chain in waiting:
            numbered = [(next(numbers), job) for job in chain]
            for number, job in numbered:
                result = await _one(number, job, retries, begin)
                results.append(result)
                on_result(result)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except* (SandlotError, OSError) as several:  # of what is read and written meanwhile
        raise several.exceptions[0] from None
    return sorted(results, key=lambda r: r.number)


async def _one(number: int, job: Job, retries: int, begin: float) -> Result:
    started = time.monotonic() - begin
    wait = _FIRST_WAIT_S
    for tries in range(1, retries + 2):
        sent = time.monotonic()
        try:
            done = await job.send()
        except TryError as error:
            latency = time.monotonic() - sent
            if not error.retryable or tries > retries:
                return Result(
                    number, job.name, job.kind, False, tries, started, latency, error.status, error=str(error)
                )
            after = error.after_s if error.after_s is not None else wait * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(after, _LONGEST_ASKED_S))
            wait = min(wait * 2, _LONGEST_WAIT_S)
            continue
        return Result(
            number,
            job.name,
            job.kind,
            True,
            tries,
            started,
            time.monotonic() - sent,
            done.status,
            done.finish,
            done.input_tokens,
            done.output_tokens,
            done.first_s,
        )
    raise AssertionError("the last try returns")


def summary(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Counts, rates, and percentiles over the requests that were answered. `seconds` is the whole time."""
    good = [r for r in results if r.ok]
    output = sum(r.output_tokens or 0 for r in good)
    rates = [r.output_tokens / r.latency_s for r in good if r.output_tokens and r.latency_s > 0]
    return {
        "requests": len(results),
        "ok": len(good),
        "failed": len(results) - len(good),
        "repeated": sum(r.tries > 1 for r in results),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3) if seconds else 0.0,
        "input_tokens": sum(r.input_tokens or 0 for r in good),
        "output_tokens": output,
        "output_tokens_per_s": round(output / seconds, 2) if seconds else 0.0,
        "latency_s": percentiles([r.latency_s for r in good]),
        "first_content_s": percentiles([r.first_s for r in good if r.first_s is not None]),
        "tokens_per_s_of_a_request": percentiles(rates),
        "kinds": dict(Counter(r.kind for r in results)),
        "errors": dict(Counter(r.error for r in results if not r.ok).most_common(10)),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p95, p99 and largest; None of nothing."""
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    found = {"mean": np.mean(values), "p50": p50, "p95": p95, "p99": p99, "max": max(values)}
    return {name: round(float(value), 4) for name, value in found.items()}
