"""TRL: rows of the rollout worker, the limit of `rollout_func`, and the worker against its protocol."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandlot.engine import SamplingParams
from sandlot.errors import FailureKind, SandlotError
from sandlot.rollout.outcome import EpisodeResult
from sandlot.train.credit import CreditConfig, credit
from sandlot.trainers import TrainerDataError
from sandlot.trainers.live import Done
from sandlot.trainers.trl import FIELDS, rollout_func_result, rollout_samples, validate
from sandlot.trainers.trl_worker import RolloutWorker, WorkerConfig
from support.rows import make_row


def episodes() -> list:
    return [
        make_row("a", turns=[(3, 2), (2, 3)], version="3"),
        make_row("a", turns=[(4, 3)], index=1, branch="side", version="4"),
        make_row("b", turns=[(3, 4)], reward=0.0, version="4"),
    ]


def test_rows_have_the_trainers_fields_and_the_weight_in_the_advantage() -> None:
    samples = credit(episodes(), CreditConfig("grpo_nostd")).samples
    rows = rollout_samples(samples)
    assert all(tuple(row) == FIELDS for row in rows)
    assert (rows[0]["input_ids"].dtype, rows[0]["old_log_probs"].dtype) == (np.int64, np.float32)
    assert rows[0]["completion_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert [row["model_version"] for row in rows] == [3, 4, 4]
    assert [row["group_id"] for row in rows] == [0, 0, 0]
    # The trainer sums over tokens and divides by their number: each episode must come out with its own share.
    total = sum(int(row["completion_mask"].sum()) for row in rows)
    shares = [row["advantage"] * int(row["completion_mask"].sum()) / total for row in rows]
    assert shares[0] + shares[1] == pytest.approx(0.5 / 2)
    assert shares[2] == pytest.approx(-0.5 / 2)


def test_equally_long_episodes_keep_their_advantage() -> None:
    samples = credit([make_row("a"), make_row("b", reward=0.0)], CreditConfig("grpo_nostd")).samples
    assert [row["advantage"] for row in rollout_samples(samples)] == pytest.approx([0.5, -0.5])


def row_with(**change: Any) -> dict[str, Any]:
    return {**rollout_samples(credit(episodes()).samples)[0], **change}


@pytest.mark.parametrize(
    ("row", "options", "why"),
    [
        (row_with(completion_mask=np.ones(9, dtype=np.int64)), {}, "9 completion_mask for 10 tokens"),
        (row_with(completion_mask=np.zeros(10, dtype=np.int64)), {}, "trains nothing"),
        (row_with(completion_mask=np.ones(10, dtype=np.int64)), {}, "first token"),
        (row_with(old_log_probs=np.full(10, -1.0)), {}, "where nothing was sampled"),
        (row_with(advantage=float("nan")), {}, "advantage nan"),
        (row_with(), {"token_budget": 9}, "drops what is over its token_budget"),
        (row_with(), {"model_version": 9, "max_staleness": 3}, "6 versions old"),
    ],
)
def test_traps(row: dict[str, Any], options: dict[str, Any], why: str) -> None:
    validate([row_with()])
    with pytest.raises(TrainerDataError, match=why):
        validate([row], **options)


def test_rollout_func_takes_one_sequence_per_prompt() -> None:
    single = [make_row("a"), make_row("b", reward=0.0)]
    result = rollout_func_result(single, 2)
    assert [len(x) for x in result["completion_ids"]] == [len(x) for x in result["env_mask"]] == [7, 7]
    assert result["reward"] == [1.0, 0.0]
    with pytest.raises(TrainerDataError, match="one sequence per prompt"):
        rollout_func_result(episodes(), 2)
    with pytest.raises(TrainerDataError, match="got 3 prompts"):
        rollout_func_result(single, 3)


class FakeLive:
    """Episodes made up on the spot, alternately solved and not; every third is lost."""

    def __init__(self, *, fail: BaseException | None = None, lost: bool = True) -> None:
        self.tasks = {
            "one": SimpleNamespace(id="one", statement="Fix it."),
            "two": SimpleNamespace(id="two", statement="x"),
        }
        self.sampling = SamplingParams()
        self.fail = fail
        self.lost = lost
        self.count = 0
        self.versions: list[str] = []
        self.running = 0

    async def episode(self, task: Any) -> Done:
        self.count += 1
        number = self.count
        self.running += 1
        try:
            await asyncio.sleep(0.01)
        finally:
            self.running -= 1
        if self.fail is not None:
            raise self.fail
        name = f"{task.id}-{number}"
        if self.lost and number % 3 == 0:
            return Done(EpisodeResult(name, task.id, "tiny", None, FailureKind.INFRA_ERROR), ())
        reward = float(number % 2)
        rows = [make_row(name, index=k, reward=reward, version=self.versions[-1]) for k in range(1 + number % 2)]
        return Done(EpisodeResult(name, task.id, "tiny", reward, turns=2), tuple(rows))

    async def announce(self, weight_version: str) -> None:
        self.versions.append(weight_version)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FakeLive]:
        yield self


def worker_of(live: FakeLive, **config: Any) -> RolloutWorker:
    settings = {"generations": 4, "groups": 2, "credit": CreditConfig("grpo_nostd"), **config}
    return RolloutWorker(live.open, WorkerConfig(**settings), sample_type=SimpleNamespace)


def test_the_worker_fills_the_queue_with_credited_groups() -> None:
    live = FakeLive()
    worker = worker_of(live)
    worker.start()
    try:
        worker.check_health(30)
        rows = [worker.rollout_buffer.get(timeout=10) for _ in range(24)]
        worker.update_model_version(5)
        deadline = time.monotonic() + 10
        while worker.rollout_buffer.get(timeout=10).model_version != 5:
            assert time.monotonic() < deadline
    finally:
        worker.stop()
    assert live.running == 0
    groups: dict[int, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    whole = [g for g in groups.values() if {r.metrics["reward"] for r in g} == {0.0, 1.0}]
    assert whole
    assert all(np.isfinite(r.advantage) for r in rows)
    assert {np.sign(r.advantage) for g in whole for r in g if r.metrics["reward"]} == {1.0}
    metrics = worker.metrics_queue.get_nowait()
    assert metrics["sandlot/lost_total"] + metrics["sandlot/reward"][1] == 4
    assert rows[0].prompt[0]["content"] in ("Fix it.", "x")


def test_a_full_queue_holds_the_worker_back_and_stop_ends_it() -> None:
    live = FakeLive(lost=False)
    worker = worker_of(live, queue_size=3, groups=1)
    worker.start()
    deadline = time.monotonic() + 10
    while not worker.rollout_buffer.full():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    made = live.count
    worker.check_health(0.0)  # waiting for the trainer is no fault
    time.sleep(0.3)
    assert live.count == made
    worker.stop()
    assert worker._thread is not None
    assert not worker._thread.is_alive()


def test_what_ends_the_worker_is_told_to_the_trainer() -> None:
    live = FakeLive(fail=SandlotError("too many episodes were lost"))
    worker = worker_of(live)
    with pytest.raises(RuntimeError, match="not running"):
        worker.check_health(1)
    worker.start()
    assert worker._thread is not None
    worker._thread.join(10)
    with pytest.raises(RuntimeError, match="too many episodes were lost"):
        worker.check_health(30)
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get_nowait()
    worker.stop()


@pytest.mark.parametrize(
    ("sampling", "why"),
    [({"temperature": 0.7}, "temperature 0.7 and the trainer divides logits by 1"), ({"top_p": 0.9}, "top_p = 1")],
)
def test_sampling_that_the_trainer_would_not_follow_is_refused(sampling: dict[str, float], why: str) -> None:
    live = FakeLive()
    live.sampling = SamplingParams(**sampling)  # type: ignore[arg-type]
    worker = worker_of(live)
    worker.start()
    assert worker._thread is not None
    worker._thread.join(10)
    with pytest.raises(RuntimeError, match=why):
        worker.check_health(30)
    assert live.count == 0
    worker.stop()


def test_long_rows_are_cut_to_the_trainers_budget() -> None:
    worker = worker_of(FakeLive(), token_budget=6)
    results = [EpisodeResult("a", "t", "tiny", 1.0), EpisodeResult("b", "t", "tiny", 0.0)]
    rows = worker.rows(results, [make_row("a", turns=[(3, 2), (2, 3)]), make_row("b", reward=0.0, turns=[(8, 2)])], 4)
    assert [(len(r["input_ids"]), r["group_id"]) for r in rows] == [(5, 4)]
    assert rows[0]["advantage"] == pytest.approx(0.5)
