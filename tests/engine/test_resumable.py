"""Generations that a weight update cuts off: continued and joined, they are what an uncut one would have been."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from sandlot.engine import Engine, EngineInfo, Generation, SamplingParams, VersionSpan, checked
from sandlot.engine.aborted import EngineAbortedError, aborted
from sandlot.engine.embedded.backend import EmbeddedBackend
from sandlot.engine.resumable import PauseMode, ResumableEngine
from sandlot.engine.server import make_app
from sandlot.engine.sglang import SglangEngine
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import ConfigError, ContextOverflowError, EngineError, EngineEvidenceError
from support import engines
from support.sglang_server import sglang
from support.toy_model import make_toy_model

STOP = 3


def next_token(ids: Sequence[int]) -> int:
    """A model: the next token is a function of all before it."""
    return hashlib.sha256(repr(list(ids)).encode()).digest()[0] % 40


@dataclass
class Cutting:
    """Samples by `next_token`; each of its first calls stops after so many tokens as `cuts` says, until aborted."""

    cuts: list[int]
    names_versions: bool = False
    max_context: int = 64
    version: str = "0"
    asked: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    waiting: dict[str, asyncio.Event] = field(default_factory=dict)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def info(self) -> EngineInfo:
        return EngineInfo("cutting", "m", self.max_context, "processed")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        self.asked.append((request_id, sampling.max_tokens, sampling.seed))
        room = self.max_context - len(prompt_ids)
        if room <= 0:
            raise ContextOverflowError(len(prompt_ids), self.max_context)
        ids: list[int] = []
        reason = "length"
        cut = self.cuts.pop(0) if self.cuts else None
        while len(ids) < min(room, sampling.max_tokens or room):
            if cut is not None and len(ids) == cut:
                told = self.waiting[request_id] = asyncio.Event()
                self.reached.set()
                await told.wait()
                del self.waiting[request_id]
                reason = "abort"
                break
            ids.append(next_token([*prompt_ids, *ids]))
            if ids[-1] in sampling.stop_token_ids:
                reason = "stop"
                break
        spans = (VersionSpan(self.version, 0, len(ids)),) if self.names_versions and ids else ()
        done = Generation(tuple(ids), tuple(-0.1 * (i + 1) for i in ids), reason, None, spans)
        if reason == "abort":
            raise aborted(done, logprob_ids=ids, reported_tokens=len(ids))
        return checked(done, logprob_ids=ids, reported_tokens=len(ids))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return []

    async def abort(self, request_id: str) -> None:
        if request_id in self.waiting:
            self.waiting[request_id].set()

    async def close(self) -> None: ...


async def through_pauses(engine: Cutting, sampling: SamplingParams, prompt: list[int]) -> Generation:
    """One generation, paused with mode `abort` wherever the engine stops, each time for another version."""
    resumable = ResumableEngine(engine)
    task = asyncio.ensure_future(resumable.generate(prompt, sampling, request_id="r", session_id="s"))
    number = 0
    while not task.done():
        engine.reached.clear()
        reached = asyncio.ensure_future(engine.reached.wait())
        await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if task.done():
            break
        await resumable.pause("abort")
        number += 1
        engine.version = f"v{number}"
        resumable.resume(engine.version)
    return await task


@settings(deadline=None, max_examples=150)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=5),
    max_tokens=st.one_of(st.none(), st.integers(1, 40)),
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=50),
    names_versions=st.booleans(),
)
def test_a_joined_turn_is_what_an_uncut_one_would_be(
    cuts: list[int], max_tokens: int | None, prompt: list[int], names_versions: bool
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))

    async def both() -> tuple[Generation, Generation, Cutting]:
        uncut = await Cutting([]).generate(prompt, sampling, request_id="u", session_id="s")
        engine = Cutting(list(cuts), names_versions)
        return uncut, await through_pauses(engine, sampling, prompt), engine

    uncut, joined, engine = asyncio.run(both())
    assert (joined.output_ids, joined.logprobs) == (uncut.output_ids, uncut.logprobs)
    assert joined.finish_reason == uncut.finish_reason
    checked(joined, logprob_ids=joined.output_ids, reported_tokens=len(uncut.output_ids))
    assert joined.versions[-1].end == len(joined.output_ids)
    # Each part was sampled by the version in force when it began.
    ends: list[tuple[str, int]] = []
    for number, cut in enumerate(cuts):
        ends.append((f"v{number}" if number else "0", cut + (ends[-1][1] if ends else 0)))
    of_token = [span.version for span in joined.versions for _ in range(span.start, span.end)]
    begin = 0
    for version, end in ends:
        assert of_token[begin:end] == [version] * len(of_token[begin:end])
        begin = min(end, len(of_token))
    assert len({name for name, _, _ in engine.asked}) == len(engine.asked)


async def test_parts_have_their_own_seed_and_what_is_left_of_the_tokens() -> None:
    engine = Cutting([4, 0, 2])
    done = await through_pauses(engine, SamplingParams(max_tokens=20, seed=7), [1, 2])
    assert engine.asked == [("r", 20, 7), ("r~1", 16, 8), ("r~2", 16, 9), ("r~3", 14, 10)]
    assert [(v.version, v.start, v.end) for v in done.versions] == [("0", 0, 4), ("v2", 4, 6), ("v3", 6, 20)]


async def test_an_abort_that_nobody_here_asked_for_stays_refused() -> None:
    engine = Cutting([4])
    resumable = ResumableEngine(engine)
    task = asyncio.ensure_future(resumable.generate([1], SamplingParams(), request_id="r", session_id="s"))
    await engine.reached.wait()
    await engine.abort("r")
    with pytest.raises(EngineAbortedError, match="refused"):
        await task
    assert len(engine.asked) == 1


async def test_a_part_that_fails_after_a_pause_fails_the_whole() -> None:
    engine = Cutting([4])
    resumable = ResumableEngine(engine)
    task = asyncio.ensure_future(resumable.generate([1], SamplingParams(), request_id="r", session_id="s"))
    await engine.reached.wait()
    await resumable.pause("abort")

    async def broken(*args: object, **more: object) -> Generation:
        raise EngineError("gone")

    engine.generate = broken  # type: ignore[method-assign, assignment]
    resumable.resume("1")
    with pytest.raises(EngineError, match="gone"):
        await task


async def test_a_drain_waits_and_a_pause_holds_back_what_comes() -> None:
    engine = Cutting([4])
    resumable = ResumableEngine(engine)
    first = asyncio.ensure_future(resumable.generate([1], SamplingParams(), request_id="1", session_id="s"))
    await engine.reached.wait()
    draining = asyncio.ensure_future(resumable.pause())
    second = asyncio.ensure_future(resumable.generate([2], SamplingParams(), request_id="2", session_id="s"))
    await asyncio.sleep(0.02)
    assert not draining.done()
    assert len(engine.asked) == 1
    await resumable.pause("abort")  # patience is over
    await draining
    assert resumable.paused
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    resumable.resume("1")
    done = await first
    assert [v.version for v in done.versions] == ["0", "1"]
    await resumable.pause()


@pytest.mark.parametrize("mode", ["drain", "abort"])
async def test_a_resume_before_the_engine_is_idle_ends_the_pause_with_an_error(mode: PauseMode) -> None:
    class Deaf(Cutting):
        async def abort(self, request_id: str) -> None: ...

    engine = Deaf([4])
    resumable = ResumableEngine(engine)
    call = asyncio.ensure_future(resumable.generate([1], SamplingParams(), request_id="r", session_id="s"))
    await engine.reached.wait()
    pausing = asyncio.ensure_future(resumable.pause(mode))
    await asyncio.sleep(0.02)
    assert not pausing.done()
    resumable.resume("1")
    with pytest.raises(ConfigError, match="pause again"):
        await pausing
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await resumable.pause(mode)


async def test_an_engine_that_cannot_abort_says_so_and_stays_open() -> None:
    class Without:
        info = score = close = generate = None

    resumable = ResumableEngine(Without())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode drain"):
        await resumable.pause("abort")
    assert not resumable.paused
    assert isinstance(resumable, Engine)


# -- real engines ----------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A server of the toy model in this process, so that its weight version can be set."""

    url: str
    backend: EmbeddedBackend
    client: VllmEngine | SglangEngine


@pytest_asyncio.fixture(params=["vllm", "sglang"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    model = make_toy_model(tmp_path / "model")
    if request.param == "sglang":
        async with sglang(model, max_context=4096) as (url, told):
            assert isinstance(told.backend, EmbeddedBackend)
            client = SglangEngine(url)
            yield Served(url, told.backend, client)
            await client.close()
        return
    backend = EmbeddedBackend.load(model, max_context=4096)
    async with TestServer(make_app(backend)) as server:
        vllm = VllmEngine(str(server.make_url("")))
        yield Served(vllm.base_url, backend, vllm)
        await vllm.close()
    await backend.close()


async def test_the_embedded_model_goes_on_exactly_where_it_was_cut(served: Served) -> None:
    sampling = SamplingParams(max_tokens=600, top_k=1)
    prompts = [[5, 6, 7, 8 + k] for k in range(3)]

    def ask(engine: Engine, k: int) -> asyncio.Future[Generation]:
        return asyncio.ensure_future(engine.generate(prompts[k], sampling, request_id=f"r{k}", session_id="s"))

    uncut = await asyncio.gather(*(ask(served.client, k) for k in range(3)))
    assert {len(g.output_ids) for g in uncut} == {600}
    resumable = ResumableEngine(served.client)
    tasks = [ask(resumable, k) for k in range(3)]
    for number in range(1, 4):
        await engines.until_running(served.url, lambda n: n == 3)
        await asyncio.sleep(0.03)
        await resumable.pause("abort")
        assert await engines.running_requests(served.url) == 0
        served.backend.weight_version = f"{number}"
        resumable.resume()
    joined = await asyncio.gather(*tasks)
    for one, whole in zip(joined, uncut, strict=True):
        assert one.output_ids == whole.output_ids
        assert one.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert one.finish_reason == "length"
        checked(one, logprob_ids=one.output_ids, reported_tokens=600)
        assert [s.version for s in one.versions] == sorted(s.version for s in one.versions)
    assert {s.version for g in joined for s in g.versions} >= {"0", "3"}


async def test_a_cut_sampled_turn_is_rescored_to_its_own_logprobs(served: Served) -> None:
    sampling = SamplingParams(max_tokens=800, seed=3)
    resumable = ResumableEngine(served.client)
    prompt = [5, 6, 7]
    task = asyncio.ensure_future(resumable.generate(prompt, sampling, request_id="r", session_id="s"))
    await engines.until_running(served.url, lambda n: n == 1)
    await resumable.pause("abort")
    resumable.resume("next")
    done = await task
    scores = await served.client.score([*prompt, *done.output_ids])
    assert scores[len(prompt) - 1 :] == pytest.approx(done.logprobs, abs=1e-3)


async def test_an_abort_from_outside_is_refused(served: Served) -> None:
    resumable = ResumableEngine(served.client)
    sampling = SamplingParams(max_tokens=4000, top_k=1)
    task = asyncio.ensure_future(resumable.generate([5, 6, 7], sampling, request_id="r", session_id="s"))
    await engines.until_running(served.url, lambda n: n == 1)
    await served.client.abort("r")
    with pytest.raises(EngineEvidenceError, match="abort"):
        await task
