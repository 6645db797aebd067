"""What every engine must do: the embedded engine, the scripted policy, real vLLM, and the SGLang client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from sandlot.engine import Engine, Generation, SamplingParams, checked
from sandlot.engine.aborted import EngineAbortedError
from sandlot.engine.probe import probe
from sandlot.engine.resumable import ResumableEngine
from sandlot.engine.sglang import SglangEngine
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import ContextOverflowError, EngineError, EngineEvidenceError
from support import engines
from support.sglang_server import sglang
from support.toy_model import make_toy_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_CONTEXT = 16384
ENDLESS: dict[str, Any] = {"top_k": 1}
"""The toy model's likeliest tokens go round in a circle and never end a turn."""
LONG = 15_000
"""Tokens that take so long that an abort comes in time, however busy the machine."""
KINDS = [
    "embedded",
    "scripted",
    "sglang",
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.timeout(900),
            pytest.mark.skipif(
                engines.VLLM_PYTHON is None, reason="SANDLOT_TEST_VLLM_PYTHON names no vLLM interpreter"
            ),
        ],
    ),
]


@dataclass(frozen=True)
class Subject:
    kind: str
    url: str
    client: VllmEngine | SglangEngine
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, text: str = "solve the contract") -> list[int]:
        return self.ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    @property
    def sampler(self) -> bool:
        """Whether it really samples from a distribution."""
        return self.kind != "scripted"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    directory = tmp_path_factory.mktemp(request.param)
    model = make_toy_model(directory / "model", max_context=2 * MAX_CONTEXT)
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "embedded":
            url = await stack.enter_async_context(engines.embedded(model, max_context=MAX_CONTEXT))
        elif request.param == "scripted":
            script = engines.CONTRACT_SCRIPT
            running = engines.scripted(model, script, directory, max_context=MAX_CONTEXT, delay_s=0.15)
            url = await stack.enter_async_context(running)
        elif request.param == "sglang":
            url, _ = await stack.enter_async_context(sglang(model, max_context=MAX_CONTEXT))
        else:
            running = engines.vllm(model, directory, max_context=MAX_CONTEXT, logprobs_mode="processed_logprobs")
            url = await stack.enter_async_context(running)
        client = SglangEngine(url) if request.param == "sglang" else VllmEngine(url)
        stack.push_async_callback(client.close)
        yield Subject(request.param, url, client, Tokenizer.from_file(str(model / "tokenizer.json")))


async def generate(subject: Subject, prompt: list[int], **sampling: object):
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return await subject.client.generate(prompt, params, request_id="r", session_id="s")


async def test_it_is_an_engine_and_says_which(subject: Subject) -> None:
    info = await subject.client.info()
    assert isinstance(subject.client, Engine)
    assert info.name == subject.kind
    assert info.max_context == MAX_CONTEXT
    assert info.model == {"scripted": "scripted", "vllm": "toy"}.get(subject.kind, "model")
    assert info.logprobs_mode == ("unknown" if subject.kind in ("vllm", "sglang") else "processed")


async def test_a_length_ending_has_exactly_max_tokens_with_one_logprob_each(subject: Subject) -> None:
    done = await generate(subject, subject.prompt(), max_tokens=7, seed=1)
    assert (len(done.output_ids), len(done.logprobs), done.finish_reason) == (7, 7, "length")
    assert all(p <= 0 for p in done.logprobs)
    # vLLM's weights have no name until somebody gives them one.
    assert [(v.start, v.end) for v in done.versions] == ([] if subject.kind == "vllm" else [(0, 7)])


async def test_a_seed_repeats_the_ids(subject: Subject) -> None:
    first, again = [await generate(subject, subject.prompt("again"), max_tokens=12, seed=5) for _ in range(2)]
    assert first.output_ids == again.output_ids
    assert first.logprobs == pytest.approx(again.logprobs, abs=1e-4)


async def test_seeds_differ(subject: Subject) -> None:
    if not subject.sampler:
        pytest.skip("a script has one continuation")
    done = [await generate(subject, subject.prompt(), max_tokens=8, seed=s) for s in range(4)]
    assert len({d.output_ids for d in done}) > 1


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(subject: Subject) -> None:
    vocabulary = tuple(range(subject.tokenizer.get_vocab_size()))
    done = await generate(subject, subject.prompt(), max_tokens=9, stop_token_ids=vocabulary, seed=2)
    assert len(done.output_ids) == 1
    assert (done.finish_reason, done.stop_reason) == ("stop", done.output_ids[0])


async def test_the_logprobs_are_those_of_a_rescoring(subject: Subject) -> None:
    prompt = subject.prompt()
    done = await generate(subject, prompt, max_tokens=24, seed=3)
    scores = await subject.client.score([*prompt, *done.output_ids])
    assert len(scores) == len(prompt) + len(done.output_ids) - 1
    assert scores[len(prompt) - 1 :] == pytest.approx(done.logprobs, abs=1e-3)


async def test_scoring_a_long_text_gives_every_token_a_score(subject: Subject) -> None:
    ids = (subject.ids("the tests pass, then I will look at the files again. ") * 60)[:700]
    scores = await subject.client.score(ids)
    assert len(scores) == 699
    assert all(s <= 0 for s in scores)


async def test_truncation_is_in_the_logprobs(subject: Subject) -> None:
    if not subject.sampler:
        pytest.skip("a script is not truncated")
    done = await generate(subject, subject.prompt(), max_tokens=5, top_k=1, temperature=0.5, seed=3)
    assert done.logprobs == pytest.approx([0.0] * 5, abs=1e-5)
    narrow = await generate(subject, subject.prompt(), max_tokens=5, top_p=1e-6, seed=3)
    assert narrow.logprobs == pytest.approx([0.0] * 5, abs=1e-5)
    assert narrow.output_ids == done.output_ids


async def test_the_probe_finds_processed_logprobs(subject: Subject) -> None:
    for sampling in (SamplingParams(temperature=0.7), SamplingParams(top_p=0.9)):
        assert await probe(subject.client, sampling) == "processed"


async def test_a_prompt_that_fills_the_context_overflows(subject: Subject) -> None:
    ids = (subject.ids("hello world ") * MAX_CONTEXT)[:MAX_CONTEXT]
    with pytest.raises(ContextOverflowError) as e:
        await generate(subject, ids)
    assert (e.value.prompt_tokens, e.value.limit) == (MAX_CONTEXT, MAX_CONTEXT)


async def test_the_servers_own_refusal_of_a_long_prompt_overflows_too(subject: Subject) -> None:
    client = type(subject.client)(subject.url)
    info = await client.info()
    # As when the server was restarted with a smaller context since the client asked.
    object.__setattr__(info, "max_context", MAX_CONTEXT * 2)
    try:
        with pytest.raises(ContextOverflowError):
            await client.generate([5] * (MAX_CONTEXT + 3), SamplingParams(), request_id="long", session_id="s")
    finally:
        await client.close()


async def test_the_last_place_in_the_context_can_be_sampled(subject: Subject) -> None:
    ids = (subject.ids("hello world ") * MAX_CONTEXT)[: MAX_CONTEXT - 1]
    done = await generate(subject, ids, max_tokens=50)
    assert len(done.output_ids) == 1


async def test_an_id_outside_the_vocabulary_is_refused_for_good(subject: Subject) -> None:
    if subject.kind == "sglang":
        pytest.skip("SGLang does not look")
    with pytest.raises(EngineError, match="vocabulary") as e:
        await generate(subject, [5, 10_000_000], max_tokens=2)
    assert not e.value.retryable


async def test_an_unknown_model_is_named(subject: Subject) -> None:
    client = type(subject.client)(subject.url, model="no-such-model")
    try:
        with pytest.raises(EngineError, match="no-such-model") as e:
            await client.info()
        assert not e.value.retryable
    finally:
        await client.close()


async def test_many_at_once_each_get_their_own(subject: Subject) -> None:
    prompts = [subject.prompt(f"the quick brown fox number {k}") for k in range(12)]
    alone = [await generate(subject, p, max_tokens=6, seed=k) for k, p in enumerate(prompts)]
    together = await asyncio.gather(*(generate(subject, p, max_tokens=6, seed=k) for k, p in enumerate(prompts)))
    for a, b in zip(alone, together, strict=True):
        assert a.output_ids == b.output_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


async def test_a_continued_turn_finds_its_prefix_cached(subject: Subject) -> None:
    if not subject.sampler:
        pytest.skip("a script computes nothing")
    prompt = subject.prompt("look at the files first " * 60)
    first = await generate(subject, prompt, max_tokens=16, seed=1)
    longer = [*prompt, *first.output_ids, *subject.prompt("and then run the tests")]
    second = await generate(subject, longer, max_tokens=4, seed=1)
    assert second.cached_tokens is not None
    assert second.cached_tokens >= len(prompt) - 128  # vLLM caches whole blocks only, of 128 tokens on a CPU


async def test_an_endless_turn_is_endless(subject: Subject) -> None:
    if not subject.sampler:
        pytest.skip("a script ends")
    done = await generate(subject, subject.prompt(), **ENDLESS, max_tokens=1900)
    assert (len(done.output_ids), done.finish_reason) == (1900, "length")


async def test_cancelling_frees_the_slot(subject: Subject) -> None:
    task = asyncio.ensure_future(generate(subject, subject.prompt(), **ENDLESS, max_tokens=LONG))
    await engines.until_running(subject.url, lambda n: n >= 1, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engines.until_running(subject.url, lambda n: n == 0)


async def test_an_aborted_request_is_refused_and_not_half_a_turn(subject: Subject) -> None:
    params = SamplingParams(**ENDLESS, max_tokens=LONG)
    call = subject.client.generate(subject.prompt(), params, request_id="doomed", session_id="s")
    task = asyncio.ensure_future(call)
    await engines.until_running(subject.url, lambda n: n >= 1, task)
    await subject.client.abort("doom")
    await engines.abort_until_done(subject.client, "doomed", task)
    with pytest.raises(EngineEvidenceError, match="abort") as e:
        await task
    assert isinstance(e.value, EngineAbortedError)
    assert 0 <= len(e.value.partial.output_ids) == len(e.value.partial.logprobs) < LONG
    await engines.until_running(subject.url, lambda n: n == 0)


async def test_a_generation_of_a_real_vllm_is_cut_off_and_goes_on(subject: Subject) -> None:
    if subject.kind != "vllm":
        pytest.skip("test_resumable.py does this with the others")
    resumable, prompt = ResumableEngine(subject.client), [5, 6, 7, 8]

    async def cut(**params: float | int) -> tuple[Generation, int]:
        sampling = SamplingParams(max_tokens=4000, **params)  # type: ignore[arg-type]
        task = asyncio.ensure_future(resumable.generate(prompt, sampling, request_id="r", session_id="s"))
        cuts = 0
        while not task.done() and cuts < 3:
            await asyncio.sleep(0.1)
            await resumable.pause("abort")
            cuts += not task.done()
            resumable.resume(f"v{cuts}")
        done = await task
        checked(done, logprob_ids=done.output_ids, reported_tokens=len(done.output_ids))
        return done, cuts

    done, cuts = await cut(**ENDLESS)
    assert (cuts, len(done.output_ids), done.finish_reason) == (3, 4000, "length")
    names = [span.version for span in done.versions]  # a part may have been cut off before its first token
    assert set(names) <= {"0", "v1", "v2", "v3"}
    assert (sorted(names), names[-1]) == (names, "v3")
    for _ in range(20):  # what is sampled may end a turn at once
        done, cuts = await cut()
        if cuts:
            break
    assert cuts
    scores = await subject.client.score([*prompt, *done.output_ids])
    assert scores[len(prompt) - 1 :] == pytest.approx(done.logprobs, abs=1e-3)
    endless = SamplingParams(max_tokens=LONG, **ENDLESS)
    task = asyncio.ensure_future(resumable.generate(prompt, endless, request_id="x", session_id="s"))
    await engines.abort_until_done(subject.client, "x", task)
    with pytest.raises(EngineAbortedError, match="refused"):
        await task


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(engines.VLLM_PYTHON is None, reason="SANDLOT_TEST_VLLM_PYTHON names no vLLM interpreter")
async def test_the_embedded_engine_computes_what_vllm_computes(tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "model", max_context=MAX_CONTEXT)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode("def add(a: int, b: int) -> int: return a + b " * 20, add_special_tokens=False).ids
    async with (
        engines.embedded(model) as ours,
        engines.vllm(model, tmp_path, max_context=MAX_CONTEXT, logprobs_mode="raw_logprobs") as theirs,
    ):
        clients = VllmEngine(ours), VllmEngine(theirs)
        try:
            mine, other = [await client.score(ids) for client in clients]
            assert mine == pytest.approx(other, abs=1e-3)
            assert await probe(clients[1], SamplingParams(temperature=1.0)) == "raw"
        finally:
            for client in clients:
                await client.close()
