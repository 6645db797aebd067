"""Continuous batching: one compute thread that reads prompts in pieces and decodes all running sequences together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sandlot.engine.backend import Completion, Request
from sandlot.engine.base import VersionSpan
from sandlot.engine.embedded.kv import Ids, KvBuffer, PrefixCache
from sandlot.engine.embedded.model import Array, LlamaModel, Piece
from sandlot.engine.embedded.sampling import logprobs_of, sample

log = logging.getLogger(__name__)

_SCORE_ROWS = 64
_ADMIT_TOKENS = 1024
"""Of a request's `max_tokens`, this many are counted when deciding whether its memory fits now."""

Done = Callable[[Completion | Exception], None]


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way. `done` is called once, in the compute thread."""

    request: Request
    done: Done
    prompt: Ids
    rng: np.random.Generator
    kv: KvBuffer | None = None
    cached: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])

    @classmethod
    def of(cls, request: Request, done: Done) -> Job:
        prompt = np.array(request.token_ids, np.int32)
        return cls(request=request, done=done, prompt=prompt, rng=np.random.default_rng(request.sampling.seed))

    def finish(self, reason: str, stop_reason: int | None = None) -> None:
        self.done(
            Completion(
                output_ids=self.output,
                logprobs=self.logprobs,
                ranks=self.ranks,
                finish_reason=reason,
                stop_reason=stop_reason,
                versions=spans(self.versions),
                cached_tokens=self.cached,
                prompt_logprobs=self.prompt_logprobs if self.request.score_prompt else None,
            )
        )


def spans(versions: Sequence[str]) -> list[VersionSpan]:
    """One version per token, as spans of equal versions."""
    result: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if result and result[-1].version == version:
            result[-1] = VersionSpan(version, result[-1].start, at + 1)
        else:
            result.append(VersionSpan(version, at, at + 1))
    return result


class Scheduler:
    """Owns the model, the prefix cache and the compute thread. `submit`, `abort` and `close` are thread-safe."""

    def __init__(
        self, model: LlamaModel, *, max_running: int = 32, cache_bytes: int = 2 << 30, prefill_tokens: int = 256
    ) -> None:
        self.model = model
        self.weight_version = "0"
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._cache = PrefixCache(model.config, cache_bytes)
        self._eos = model.config.eos_token_ids
        self._changed = threading.Condition()
        self._inbox: list[Job] = []
        self._aborted: set[Job] = set()
        self._closing = False
        self._waiting: deque[Job] = deque()
        self._reading: Job | None = None
        self._decoding: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._inbox.append(job)
            self._changed.notify()

    def abort(self, job: Job) -> None:
        """Finish the job with reason `abort` before the next step. Nothing happens if it is finished already."""
        with self._changed:
            self._aborted.add(job)
            self._changed.notify()

    def close(self) -> None:
        """Abort everything and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._take():
            try:
                self._step()
            except Exception as e:
                # The sequences of a failed step hold keys that were never computed, so none of them may live on.
                log.exception("a step of the embedded engine failed")
                for job in self._running():
                    job.done(e)
                self._reading, self._decoding = None, []
        for job in (*self._running(), *self._waiting):
            job.finish("abort")

    def _running(self) -> list[Job]:
        return [*self._decoding, *([self._reading] if self._reading else [])]

    def _take(self) -> bool:
        """Wait until there is work, sort in what arrived, drop what was aborted. False when closing."""
        with self._changed:
            while not (self._closing or self._inbox or self._aborted or self._waiting or self._running()):
                self._changed.wait()
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            aborted, self._aborted = self._aborted, set()
            closing = self._closing
        for job in aborted:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job in self._decoding:
                self._decoding.remove(job)
                self._retire(job)
            elif job is self._reading:
                self._reading = None
                self._retire(job)
            else:
                continue
            job.finish("abort")
        return not closing

    def _retire(self, job: Job) -> None:
        if job.kv is not None:
            self._cache.keep(job.kv)
            job.kv = None
            self._cache.shrink(self._running_bytes())

    def _running_bytes(self) -> int:
        return sum(job.kv.nbytes for job in self._running() if job.kv is not None)

    def _start_next(self) -> None:
        """Begin to read the next prompt, if there is a place and memory for it."""
        if self._reading or not self._waiting or len(self._decoding) >= self._max_running:
            return
        job = self._waiting[0]
        tokens = len(job.prompt) + min(job.request.sampling.max_tokens or 0, _ADMIT_TOKENS)
        need = tokens * self.model.config.kv_bytes_per_token
        if self._decoding and self._running_bytes() + need > self._cache.budget_bytes:
            return
        self._waiting.popleft()
        self._cache.shrink(self._running_bytes() + need)
        if job.request.score_prompt:
            job.kv = KvBuffer(self.model.config, len(job.prompt))
        else:
            job.kv = self._cache.start(job.prompt, [j.kv for j in self._decoding if j.kv is not None])
        job.cached = job.kv.length
        self._reading = job

    def _step(self) -> None:
        """One forward pass: the next token of every decoding job, and a piece of the prompt that is being read."""
        self._start_next()
        version = self.weight_version
        jobs = list(self._decoding)
        pieces = [Piece(_kv(job), np.array(job.output[-1:], np.int32)) for job in jobs]
        reading, at = self._reading, 0
        if reading is not None:
            at = _kv(reading).length
            pieces.append(Piece(_kv(reading), reading.prompt[at : at + self._prefill_tokens]))
        if not pieces:
            return
        hidden = self.model.forward(pieces)
        if reading is not None:
            if reading.request.score_prompt:
                self._score(reading, hidden[len(jobs) :], at)
            if _kv(reading).length == len(reading.prompt):
                self._reading = None
                self._decoding.append(reading)
                jobs.append(reading)
                hidden = np.concatenate([hidden[: len(jobs) - 1], hidden[-1:]])
        if jobs:
            self._sample(jobs, self.model.logits(hidden[: len(jobs)]), version)

    def _score(self, job: Job, hidden: Array, at: int) -> None:
        """Append the logprobs of the prompt tokens that follow the rows of `hidden`, which begin at `at`."""
        following = job.prompt[at + 1 : at + 1 + len(hidden)]
        for k in range(0, len(following), _SCORE_ROWS):
            tokens = following[k : k + _SCORE_ROWS]
            values = logprobs_of(self.model.logits(hidden[k : k + len(tokens)]), tokens)
            job.prompt_logprobs.extend(min(float(v), 0.0) for v in values)

    def _sample(self, jobs: Sequence[Job], logits: Array, version: str) -> None:
        for job, row in zip(jobs, logits, strict=True):
            request = job.request
            token, logprob, rank = sample(row, request.sampling, job.rng)
            job.output.append(token)
            job.logprobs.append(logprob)
            job.ranks.append(rank)
            job.versions.append(version)
            if token in self._eos and not request.ignore_eos:
                self._end(job, "stop", None if token == self._eos[0] else token)
            elif token in request.sampling.stop_token_ids:
                self._end(job, "stop", token)
            elif len(job.output) >= (request.sampling.max_tokens or 1):
                self._end(job, "length", None)

    def _end(self, job: Job, reason: str, stop_reason: int | None) -> None:
        self._decoding.remove(job)
        self._retire(job)
        job.finish(reason, stop_reason)


def _kv(job: Job) -> KvBuffer:
    assert job.kv is not None, "a running job has a buffer"
    return job.kv
