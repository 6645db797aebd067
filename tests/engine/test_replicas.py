"""Sessions over replicas: each stays where its cache is, only those of a lost replica move, and they come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import unused_port
from hypothesis import given
from hypothesis import strategies as st

from sandlot.config import load_config
from sandlot.engine import Engine, EngineInfo, Generation, SamplingParams
from sandlot.engine.aborted import Abortable, EngineAbortedError, aborted
from sandlot.engine.client import EngineGoneError, EngineUnreachableError
from sandlot.engine.process import EngineProcess
from sandlot.engine.replicas import ReplicatedEngine, placed
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import ConfigError, EngineError
from sandlot.rollout import policy
from sandlot.rollout.policy import engine_at, policy_of
from support.profiles import few
from support.sampling_model import Model
from support.sglang_server import sglang
from support.toy_model import make_toy_model

NAMES = [f"http://replica-{k}:8000" for k in range(5)]


class Replica:
    """Answers with its number, or is down."""

    def __init__(self, number: int, *, model: str = "m", max_context: int = 100) -> None:
        self.number, self.model, self.max_context = number, model, max_context
        self.vocab_size = 600 + number
        self.down = self.gone = False
        self.closed = False
        self.sessions: list[str] = []
        self.held: dict[str, asyncio.Future[None]] = {}
        self.hold = False

    def _alive(self) -> None:
        if self.down:
            kind = EngineGoneError if self.gone else EngineUnreachableError
            raise kind(f"no engine answers at {self.number}")

    async def info(self) -> EngineInfo:
        self._alive()
        return EngineInfo("r", self.model, self.max_context, "unknown", vocab_size=self.vocab_size)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        self._alive()
        self.sessions.append(session_id)
        if self.hold:
            self.held[request_id] = asyncio.get_running_loop().create_future()
            await self.held[request_id]
            raise aborted(Generation((7,), (-1.0,), "abort"), logprob_ids=[7])
        return Generation((self.number,), (-1.0,), "length")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._alive()
        return [-float(self.number)]

    async def abort(self, request_id: str) -> None:
        self.held[request_id].set_result(None)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
async def replicas() -> AsyncIterator[tuple[ReplicatedEngine, dict[str, Replica]]]:
    parts = {name: Replica(k) for k, name in enumerate(NAMES)}
    engine = ReplicatedEngine(parts, recheck_s=0.02)
    yield engine, parts
    await engine.close()
    assert all(part.closed for part in parts.values())


async def where(engine: ReplicatedEngine, sessions: Sequence[str]) -> dict[str, int]:
    calls = (engine.generate([1], SamplingParams(), request_id=f"r-{s}", session_id=s) for s in sessions)
    return {s: g.output_ids[0] for s, g in zip(sessions, await asyncio.gather(*calls), strict=True)}


@few
@given(session=st.text(max_size=20), lost=st.sampled_from(NAMES))
def test_without_one_name_the_order_of_the_others_is_the_same(session: str, lost: str) -> None:
    order = placed(session, NAMES)
    assert sorted(order) == sorted(NAMES)
    assert placed(session, [n for n in reversed(NAMES) if n != lost]) == [n for n in order if n != lost]


def test_sessions_are_spread_evenly() -> None:
    firsts = [placed(f"session-{k}", NAMES)[0] for k in range(2000)]
    assert all(300 < firsts.count(name) < 500 for name in NAMES)


async def test_only_the_sessions_of_a_lost_replica_move_and_they_return(
    replicas: tuple[ReplicatedEngine, dict[str, Replica]],
) -> None:
    engine, parts = replicas
    sessions = [f"s{k}" for k in range(60)]
    before = await where(engine, sessions)
    assert set(before.values()) == set(range(5))
    assert await where(engine, sessions) == before
    parts[NAMES[2]].down = True
    during = await where(engine, sessions)
    assert {s for s in sessions if during[s] != before[s]} == {s for s in sessions if before[s] == 2}
    assert len({during[s] for s in sessions if before[s] == 2}) > 1
    assert NAMES[2] not in engine.up
    parts[NAMES[2]].down = False
    async with asyncio.timeout(5):
        while len(engine.up) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await where(engine, sessions) == before


async def test_when_none_answers_that_is_retryable(replicas: tuple[ReplicatedEngine, dict[str, Replica]]) -> None:
    engine, parts = replicas
    for part in parts.values():
        part.down = True
    for _ in range(2):
        with pytest.raises(EngineError, match="none of the 5") as e:
            await where(engine, ["s"])
        assert e.value.retryable
    with pytest.raises(EngineError, match="none of the 5"):
        await engine.score([1, 2])


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "another"}, "different models"),
        ({"max_context": 99}, "its context has 99 tokens and must have 100"),
        ({"vocab_size": 7}, "it has 7 tokens and had 601"),
    ],
)
async def test_a_replica_that_comes_back_as_another_stays_out(
    replicas: tuple[ReplicatedEngine, dict[str, Replica]],
    change: dict[str, object],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, parts = replicas
    await engine.info()
    sessions = [f"s{k}" for k in range(40)]
    back = parts[NAMES[1]]
    back.down = True
    await where(engine, sessions)
    assert engine.out == {NAMES[1]: "it does not answer"}
    before = {name: getattr(back, name) for name in change}
    vars(back).update(change, down=False)
    await until(lambda: engine.refused)
    assert why in engine.out[NAMES[1]]
    assert why in caplog.text
    assert 1 not in (await where(engine, sessions)).values()
    vars(back).update(before)
    await until(lambda: not engine.out)
    assert engine.refused == {}
    assert 1 in (await where(engine, sessions)).values()


async def test_a_replica_that_comes_back_is_examined_before_it_serves(
    replicas: tuple[ReplicatedEngine, dict[str, Replica]],
) -> None:
    engine, parts = replicas
    await engine.info()
    examined: list[tuple[object, object]] = []
    wrong: list[Exception] = [ConfigError("its logprobs are raw"), ValueError("no JSON")]

    async def examine(replica: Engine, other: Engine | None) -> None:
        examined.append((replica, other))
        assert engine.up
        if wrong:
            raise wrong.pop(0)

    engine.examine = examine
    parts[NAMES[0]].down = True
    await where(engine, [f"s{k}" for k in range(40)])
    assert examined == []
    parts[NAMES[0]].down = False
    await until(lambda: engine.refused)
    assert engine.out == {NAMES[0]: "its logprobs are raw"}
    await until(lambda: not engine.out)
    assert examined == [(parts[NAMES[0]], parts[NAMES[1]])] * 3


@pytest.mark.parametrize(
    ("comes_back", "why"),
    [
        (Model("raw", seed=3), "its logprobs are raw, those of the others processed"),
        (Model("processed", seed=4), "its weights are others"),
        (Model("shifted", seed=3), "neither"),
        (Model("processed", seed=3), ""),
    ],
)
async def test_what_a_restarted_replica_is_refused_for(comes_back: Model, why: str) -> None:
    """It has the address of the one that went, and what it says of itself is the same."""
    names = ["http://goes", "http://stays"]
    goes = Model("processed", seed=3)
    engine = ReplicatedEngine({names[0]: goes, names[1]: Model("processed", seed=3)}, recheck_s=0.01)
    assert await policy._probe_replicas(engine, SamplingParams(), range(100, 120)) == "processed"
    engine.replicas[names[0]] = comes_back
    engine._lost(names[0])
    if why:
        await until(lambda: engine.refused)
        assert why in engine.refused[names[0]]
        assert engine.up == names[1:]
    else:
        await until(lambda: not engine.out)
    await engine.close()


async def test_info_is_what_all_have_and_every_address_must_answer_at_first() -> None:
    parts = {NAMES[0]: Replica(0, max_context=100), NAMES[1]: Replica(1, max_context=80)}
    engine = ReplicatedEngine(parts)
    parts[NAMES[1]].down = True
    with pytest.raises(EngineUnreachableError):
        await engine.info()
    parts[NAMES[1]].down = False
    info = await engine.info()
    assert (info.model, info.max_context, info.vocab_size) == ("m", 80, 600)
    parts[NAMES[1]].down = True
    assert (await engine.info()).max_context == 80
    await engine.close()
    other = ReplicatedEngine({NAMES[0]: Replica(0), NAMES[1]: Replica(1, model="n")})
    with pytest.raises(EngineError, match="different models"):
        await other.info()


async def test_an_abort_reaches_the_replica_that_has_the_request(
    replicas: tuple[ReplicatedEngine, dict[str, Replica]],
) -> None:
    engine, parts = replicas
    assert isinstance(engine, Engine)
    assert isinstance(engine, Abortable)
    for part in parts.values():
        part.hold = True
    calls = [asyncio.ensure_future(where(engine, [f"s{k}"])) for k in range(10)]
    async with asyncio.timeout(5):
        while sum(len(part.held) for part in parts.values()) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await engine.abort("r-unknown")
    for k in range(10):
        await engine.abort(f"r-s{k}")
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, EngineAbortedError) and r.partial.output_ids == (7,) for r in results)


async def test_one_alone_is_examined_after_nothing_listened_there_and_else_asked_at_once() -> None:
    one = Replica(0)
    engine = ReplicatedEngine({NAMES[0]: one}, recheck_s=0.01)
    await engine.info()
    one.down = True
    with pytest.raises(EngineUnreachableError, match="no engine answers at 0"):
        await where(engine, ["s"])
    one.down = False
    assert await where(engine, ["s"]) == {"s": 0}  # it was busy, or what is before it was
    one.down = one.gone = True
    with pytest.raises(EngineGoneError, match="no engine answers at 0"):
        await where(engine, ["s"])
    one.down, one.vocab_size = False, 7
    await until(lambda: engine.refused)
    with pytest.raises(EngineError, match=r"the engine does not serve: .*it has 7 tokens and had 600") as e:
        await where(engine, ["s"])
    assert e.value.retryable
    one.vocab_size = 600
    await until(lambda: engine.up)
    assert await where(engine, ["s"]) == {"s": 0}
    await engine.close()


def test_several_addresses_make_replicas() -> None:
    engine = engine_at("http://a:1, http://b:2", "vllm")
    assert list(engine.replicas) == ["http://a:1", "http://b:2"]
    assert isinstance(engine_at("http://a:1", "vllm").replicas["http://a:1"], VllmEngine)
    for wrong in ("a,b", "http://a:1,nope", ",", "http://a:1,http://a:1", "http://a:1,http://a:1/v1/", "http://a:b"):
        with pytest.raises(ConfigError):
            engine_at(wrong, "vllm")


def test_nobody_is_told_the_password_of_an_engine() -> None:
    engine = engine_at("http://me:se%20cret@a:1/v1,http://b:2", "vllm")
    assert list(engine.replicas) == ["http://a:1", "http://b:2"]
    client = engine.replicas["http://a:1"]
    assert isinstance(client, VllmEngine)
    assert client.base_url == "http://a:1"
    assert client._headers == {"Authorization": "Basic bWU6c2UgY3JldA=="}


async def test_a_policy_over_sglang_replicas_probes_each(tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "model")
    async with sglang(model, max_context=2048) as (one, first), sglang(model, max_context=1024) as (two, second):
        flags = {"engine": f"{one},{two}", "engine_kind": "sglang", "model": model}
        async with policy_of(load_config(None, flags), (), say=lambda text: None) as policy:
            assert isinstance(policy.engine, ReplicatedEngine)
            assert (policy.logprobs_mode, policy.max_context, policy.model) == ("processed", 1024, "model")
            for server in (first, second):
                scored = [body for body in server.bodies if body.get("logprob_start_len") == 0]
                assert 0 < len(scored) < len(server.bodies)
            asked = len(first.bodies), len(second.bodies)
            for _ in range(3):
                params = SamplingParams(max_tokens=2)
                await policy.engine.generate([5, 6], params, request_id="r", session_id="stays")
            more = sorted((len(first.bodies) - asked[0], len(second.bodies) - asked[1]))
            assert more == [0, 3]


@pytest.mark.timeout(120)
async def test_real_servers_one_is_killed_and_started_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_toy_model(tmp_path_factory.mktemp("replicas") / "toy")
    ports = [unused_port(), unused_port()]
    params = SamplingParams(max_tokens=4, top_k=1)
    async with EngineProcess(model, port=ports[0], threads=1) as stays:
        goes = EngineProcess(model, port=ports[1], threads=1)
        await goes.start()
        engine = engine_at(f"{stays.url},{goes.url}", "vllm")
        engine._recheck_s = 0.1
        try:
            assert (await engine.info()).model == "toy"
            session = next(s for s in map(str, range(99)) if placed(s, list(engine.replicas))[0] == goes.url)
            first = await engine.generate([5, 6, 7], params, request_id="1", session_id=session)
            running = asyncio.ensure_future(
                engine.generate([5, 6], SamplingParams(max_tokens=60_000, top_k=1), request_id="2", session_id=session)
            )
            async with aiohttp.ClientSession() as http:
                while True:
                    async with http.get(goes.url + "/metrics") as reply:
                        if (await reply.text()).rstrip().endswith(" 1"):
                            break
                    await asyncio.sleep(0.02)
            await goes.stop()
            again = await engine.generate([5, 6, 7], params, request_id="3", session_id=session)
            assert again.output_ids == first.output_ids
            assert engine.up == [stays.url]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            async with EngineProcess(model, port=ports[1], threads=1), asyncio.timeout(30):
                while len(engine.up) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await engine.generate([5, 6, 7], params, request_id="4", session_id=session)
        finally:
            await engine.close()
            await goes.stop()
