"""A rollout worker for TRL's `AsyncGRPOTrainer`: groups of real episodes, credited by episode, into its queue."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sandlot.engine import SamplingParams
from sandlot.errors import ConfigError, FailureKind, MissingDependencyError, SandlotError
from sandlot.rollout.outcome import EpisodeResult
from sandlot.tasks import Task
from sandlot.train.credit import CreditConfig, Outcome, credit
from sandlot.train.overlong import cut_overlong
from sandlot.trainers.base import Numbers
from sandlot.trainers.live import Done
from sandlot.trainers.trl import rollout_samples

_PUSH_WAIT = 0.2
"""Seconds a full queue is waited for before looking whether the worker should stop."""
_STOP_WAIT = 60.0


class Live(Protocol):
    """What the worker needs of `sandlot.trainers.live.LiveRollouts`."""

    @property
    def tasks(self) -> Mapping[str, Task]: ...

    @property
    def sampling(self) -> SamplingParams: ...

    async def episode(self, task: Task) -> Done: ...

    async def announce(self, weight_version: str) -> None: ...


@dataclass(frozen=True)
class WorkerConfig:
    """`generations` episodes per group, `groups` groups at once. `token_budget` is the trainer's: longer rows are cut
    at whole turns, because it would drop them. `temperature` is the trainer's, by which it divides logits. `queue_size`
    bounds the rows that wait."""

    generations: int = 8
    groups: int = 4
    token_budget: int | None = None
    temperature: float = 1.0
    queue_size: int = 256
    credit: CreditConfig = field(default_factory=CreditConfig)

    def __post_init__(self) -> None:
        if min(self.generations, self.groups, self.queue_size) < 1:
            raise ConfigError("generations, groups and queue_size must be at least 1")


class RolloutWorker:
    """Implements `RolloutWorkerProtocol`; runs in a thread of the trainer's process with an event loop of its own.

    `open_live` makes the rollouts inside that loop: `lambda: LiveRollouts.open(config, hook)`. Tasks come round in
    order for as long as the trainer trains. A group whose episodes say nothing (ungraded, lost) is run again later.
    """

    def __init__(
        self,
        open_live: Callable[[], AbstractAsyncContextManager[Live]],
        config: WorkerConfig | None = None,
        *,
        sample_type: Callable[..., Any] | None = None,
    ) -> None:
        self.config = config or WorkerConfig()
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(self.config.queue_size)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._open_live = open_live
        self._sample_type = sample_type
        self._version = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._progress = time.monotonic()

    def start(self) -> None:
        """Begin to produce; returns at once."""
        if self._thread is not None:
            raise SandlotError("this rollout worker was started already")
        self._sample_type = self._sample_type or _trl_sample()
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sandlot-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all episodes and wait until their sandboxes are gone."""
        self._stopping.set()
        loop, main = self._loop, self._main
        if loop is not None and main is not None and not loop.is_closed():
            loop.call_soon_threadsafe(main.cancel)
        if self._thread is not None:
            self._thread.join(_STOP_WAIT)

    def update_model_version(self, model_version: int) -> None:
        """Tokens sampled from now on carry this version."""
        self._version = model_version
        loop, live = self._loop, self._live
        if loop is not None and live is not None and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(live.announce(str(model_version)), loop)

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the worker, or when no episode ended and no row was taken for too long."""
        if self._error is not None:
            raise RuntimeError(f"the rollout worker ended: {self._error}") from self._error
        if self._thread is None or not (self._thread.is_alive() or self._stopping.is_set()):
            raise RuntimeError("the rollout worker is not running")
        if not self.rollout_buffer.full() and time.monotonic() - self._progress > stale_after_s:
            raise RuntimeError(f"no episode has ended for {stale_after_s:g} s")

    def _run(self) -> None:
        try:
            asyncio.run(self._produce())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._error = error

    async def _produce(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopping.is_set():
            return
        async with self._open_live() as live:
            self._live = live
            await live.announce(str(self._version))
            if not live.tasks:
                raise ConfigError("there are no tasks to roll out")
            self._check(live.sampling)
            slots = asyncio.Semaphore(self.config.groups)
            try:
                async with asyncio.TaskGroup() as running:
                    for number, task in enumerate(itertools.cycle(live.tasks.values())):
                        await slots.acquire()
                        made = running.create_task(self._group(live, task, number))
                        made.add_done_callback(lambda _: slots.release())
            except* SandlotError as several:
                raise several.exceptions[0] from None
            finally:
                self._live = None

    def _check(self, sampling: SamplingParams) -> None:
        """The trainer computes the same log-probabilities only of the distribution that was sampled from."""
        if sampling.temperature != self.config.temperature:
            raise ConfigError(
                f"episodes are sampled at temperature {sampling.temperature:g} and the trainer divides logits by "
                f"{self.config.temperature:g}: make sampling.temperature and the trainer's temperature the same"
            )
        if sampling.top_p != 1.0 or sampling.top_k not in (-1, 0):
            raise ConfigError("the trainer's log-probabilities are over all tokens: sample with top_p = 1 and no top_k")

    async def _group(self, live: Live, task: Task, number: int) -> None:
        done = await asyncio.gather(*(self._episode(live, task) for _ in range(self.config.generations)))
        rows = self.rows([d.result for d in done], [s for d in done for s in d.samples], number)
        self.metrics_queue.put(_metrics([d.result for d in done], len(rows)))
        prompt = [{"role": "user", "content": task.statement}]
        for row in rows:
            sample_type = self._sample_type
            assert sample_type is not None
            await self._push(sample_type(**{**row, "prompt": prompt, "enqueued_at": time.time()}))

    async def _episode(self, live: Live, task: Task) -> Done:
        done = await live.episode(task)
        self._progress = time.monotonic()
        return done

    def rows(self, results: Iterable[EpisodeResult], samples: Iterable[Any], number: int) -> list[dict[str, Any]]:
        """The rows of one group: credited over its episodes, cut to the budget, numbered as a group of its own."""
        group = f"group-{number}"
        own = [replace(s, group_id=group) for s in samples]
        outcomes = [Outcome(r.episode_id, group, r.reward, r.failure) for r in results]
        known = {o.episode_id: o for o in outcomes}
        own = [s for s in own if s.episode_id in known]
        if self.config.token_budget is not None:
            own = cut_overlong(own, self.config.token_budget)
        credited = credit(own, self.config.credit, outcomes=outcomes).samples
        if not credited:
            return []
        return rollout_samples(credited, group_ids=Numbers({group: number}), token_budget=self.config.token_budget)

    async def _push(self, sample: Any) -> None:
        """Into the queue, waiting while it is full without holding up other episodes."""
        while True:
            try:
                self.rollout_buffer.put_nowait(sample)
            except queue.Full:
                await asyncio.sleep(_PUSH_WAIT)
            else:
                self._progress = time.monotonic()
                return


def _metrics(results: list[EpisodeResult], rows: int) -> dict[str, Any]:
    graded = [r.reward for r in results if r.reward is not None]
    return {
        "sandlot/reward": (sum(graded), len(graded)),
        "sandlot/solved": (sum(r.solved for r in results), len(graded)),
        "sandlot/ungraded_total": float(len(results) - len(graded)),
        "sandlot/lost_total": float(sum(r.failure is FailureKind.INFRA_ERROR for r in results)),
        "sandlot/turns": (float(sum(r.turns for r in results)), len(results)),
        "sandlot/rows_total": float(rows),
    }


def _trl_sample() -> Callable[..., Any]:
    try:
        from trl.experimental.async_grpo.async_rollout_worker import (  # type: ignore[import-not-found, unused-ignore]
            RolloutSample,
        )
    except ImportError:
        raise MissingDependencyError("trl", "trl") from None
    return RolloutSample  # type: ignore[no-any-return, unused-ignore]
