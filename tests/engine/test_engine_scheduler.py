"""Continuous batching and the prefix cache: nothing a request gets depends on who else runs or ran."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandlot.engine import SamplingParams, VersionSpan
from sandlot.engine.backend import Completion, Request
from sandlot.engine.embedded.kv import KvBuffer, PrefixCache, common_prefix
from sandlot.engine.embedded.model import LlamaModel
from sandlot.engine.embedded.scheduler import Job, Scheduler, spans
from support.toy_model import make_toy_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel.from_directory(make_toy_model(tmp_path_factory.mktemp("toy")))


@pytest.fixture
def scheduler(model: LlamaModel) -> Iterator[Scheduler]:
    running = Scheduler(model, prefill_tokens=64)
    yield running
    running.close()


class Pending:
    """A submitted request; `result` waits for it."""

    def __init__(self, scheduler: Scheduler, prompt: list[int], **options: Any) -> None:
        self._outcome: queue.Queue[Completion | Exception] = queue.Queue()
        score = options.pop("score_prompt", False)
        options = {"max_tokens": 12, "seed": 1, **options}
        request = Request("r", tuple(prompt), SamplingParams(**options), ignore_eos=True, score_prompt=score)
        self.job = Job.of(request, self._outcome.put)
        scheduler.submit(self.job)

    def result(self) -> Completion:
        outcome = self._outcome.get(timeout=20)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def prompt(seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 600, length)]


def test_a_cached_prefix_changes_nothing(model: LlamaModel, scheduler: Scheduler) -> None:
    first = prompt(1, 150)
    a = Pending(scheduler, first).result()
    continued = [*first, *a.output_ids, *prompt(2, 30)]
    forked = [*first[:100], *prompt(3, 50)]
    for ids, at_least in ((continued, 161), (forked, 100), (first, 149), (continued, 191)):
        warm = Pending(scheduler, ids).result()
        fresh = Scheduler(model)
        cold = Pending(fresh, ids).result()
        fresh.close()
        assert warm.cached_tokens >= at_least
        assert cold.cached_tokens == 0
        assert warm.output_ids == cold.output_ids
        assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-4)


def test_requests_that_start_together_share_the_prompt_of_the_first(scheduler: Scheduler) -> None:
    ids = prompt(4, 200)
    done = [p.result() for p in [Pending(scheduler, ids, seed=k) for k in range(6)]]
    assert [d.cached_tokens for d in done] == [0, 199, 199, 199, 199, 199]
    assert len({tuple(d.output_ids) for d in done}) > 1


def test_what_runs_beside_a_request_does_not_change_it(scheduler: Scheduler) -> None:
    prompts = [prompt(10 + k, 20 + 37 * k) for k in range(8)]
    alone = [Pending(scheduler, p, seed=k).result() for k, p in enumerate(prompts)]
    together = [p.result() for p in [Pending(scheduler, p, seed=k) for k, p in enumerate(prompts)]]
    for a, b in zip(alone, together, strict=True):
        assert a.output_ids == b.output_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_more_requests_than_places_all_finish(model: LlamaModel) -> None:
    scheduler = Scheduler(model, max_running=2)
    done = [p.result() for p in [Pending(scheduler, prompt(k, 10)) for k in range(9)]]
    scheduler.close()
    assert all(len(d.output_ids) == 12 for d in done)


def test_memory_below_what_is_asked_serializes_and_never_blocks(model: LlamaModel) -> None:
    scheduler = Scheduler(model, cache_bytes=1)
    done = [p.result() for p in [Pending(scheduler, prompt(k, 300)) for k in range(4)]]
    again = Pending(scheduler, prompt(0, 300)).result()
    scheduler.close()
    assert all(len(d.output_ids) == 12 for d in done)
    assert again.cached_tokens == 0


def test_an_aborted_request_ends_with_what_it_has(scheduler: Scheduler) -> None:
    running = Pending(scheduler, prompt(1, 10), max_tokens=100_000)
    while not running.job.output:
        threading.Event().wait(0.001)
    waiting = [Pending(scheduler, prompt(k, 400), max_tokens=100_000) for k in range(3)]
    for pending in (*waiting, running):
        scheduler.abort(pending.job)
    for pending in (*waiting, running):
        done = pending.result()
        assert done.finish_reason == "abort"
        assert len(done.output_ids) == len(done.logprobs) < 100_000
    assert len(Pending(scheduler, prompt(5, 5)).result().output_ids) == 12
    scheduler.abort(running.job)  # long over: nothing happens
    assert len(Pending(scheduler, prompt(5, 5)).result().output_ids) == 12


def test_closing_aborts_what_runs(model: LlamaModel) -> None:
    scheduler = Scheduler(model)
    pending = [Pending(scheduler, prompt(k, 10), max_tokens=100_000) for k in range(3)]
    scheduler.close()
    assert [p.result().finish_reason for p in pending] == ["abort"] * 3
    with pytest.raises(RuntimeError, match="closed"):
        Pending(scheduler, prompt(1, 3))


def test_a_failed_step_fails_its_requests_and_leaves_no_half_computed_cache(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(model)
    real = model.forward

    def broken(pieces: Any) -> Any:
        for piece in pieces:
            piece.kv.append_ids(piece.ids)
        raise MemoryError("no memory")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(MemoryError):
        Pending(scheduler, prompt(1, 50)).result()
    monkeypatch.setattr(model, "forward", real)
    done = Pending(scheduler, prompt(1, 50)).result()
    scheduler.close()
    assert done.cached_tokens == 0


def test_a_prompt_is_scored_as_it_is_sampled(scheduler: Scheduler) -> None:
    ids = prompt(6, 130)
    done = Pending(scheduler, ids, max_tokens=20).result()
    scored = Pending(scheduler, [*ids, *done.output_ids], max_tokens=1, score_prompt=True).result()
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == 150
    assert scored.prompt_logprobs[130:] == pytest.approx(done.logprobs, abs=1e-4)
    # Scoring reads every position anew, so it also proves what the cache gave.
    assert scored.cached_tokens == 0


def test_versions_are_told_per_token(scheduler: Scheduler) -> None:
    pending = Pending(scheduler, prompt(1, 10), max_tokens=3000)
    while len(pending.job.output) < 5:
        threading.Event().wait(0.001)
    scheduler.weight_version = "1"
    versions = pending.result().versions
    assert [v.version for v in versions] == ["0", "1"]
    assert (versions[0].start, versions[0].end, versions[1].end) == (0, versions[1].start, 3000)
    assert spans([]) == []
    assert spans(["a", "a", "b"]) == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]


def test_the_cache_keeps_the_recently_used_within_its_budget(model: LlamaModel) -> None:
    config = model.config
    one = KvBuffer(config, 256).nbytes
    cache = PrefixCache(config, 2 * one)
    buffers = []
    for k in range(3):
        buffer = KvBuffer(config, 256)
        buffer.append_ids(np.array(prompt(k, 200), np.int32))
        buffer.data[...] = k
        buffers.append(buffer)
    for buffer in buffers[:2]:
        cache.keep(buffer)
    # Using the older one makes the other the one to go; a fork copies, so both stay whole.
    fork = cache.start(np.array([*prompt(0, 100), 3, 4, 5], np.int32), [])
    assert fork is not buffers[0]
    assert (fork.length, float(fork.data[..., :100, :].max())) == (100, 0.0)
    cache.keep(buffers[2])
    cache.shrink(0)
    assert len(cache) == 2
    assert cache.start(np.array(prompt(1, 200), np.int32), []).length == 0
    # A continuation takes the kept sequence over instead of copying it.
    assert cache.start(np.array([*prompt(0, 200), 7], np.int32), []) is buffers[0]
    assert len(cache) == 1


def test_a_buffer_grows_and_keeps_what_it_holds(model: LlamaModel) -> None:
    buffer = KvBuffer(model.config, 1)
    buffer.append_ids(np.arange(10, dtype=np.int32))
    buffer.data[..., :10, :] = 7
    buffer.append_ids(np.arange(1000, dtype=np.int32))
    assert buffer.length == 1010
    assert float(buffer.data[..., :10, :].min()) == 7
    assert list(buffer.tokens[:12]) == [*range(10), 0, 1]


def test_common_prefix() -> None:
    a = np.array([1, 2, 3], np.int32)
    assert [common_prefix(a, np.array(b, np.int32)) for b in ([], [1], [2], [1, 2, 3], [1, 2, 4, 5])] == [0, 1, 0, 3, 2]


def test_toy_models_are_equal_each_time(tmp_path: Path) -> None:
    a, b = (make_toy_model(tmp_path / name) for name in "ab")
    assert {f.name: f.read_bytes() for f in a.iterdir()} == {f.name: f.read_bytes() for f in b.iterdir()}
