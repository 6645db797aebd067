"""The time of a session: it ends calls at the engine, and stands still while the engine's side does not serve."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.engine import Generation
from sandlot.errors import EngineError
from sandlot.gateway import GatewayLimits, SessionLimits
from sandlot.gateway.clock import Clock, OutOfTimeError
from support.passing import passes
from support.profiles import few
from support.rig import MakeRig, Rig, ask

LIMIT = 1000.0
LIMITS = SessionLimits(wall_clock=LIMIT)
WIRES = {
    "/v1/messages": ask("hi", tools=False),
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}
_GOOGLE = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


async def post(rig: Rig, path: str, body: dict[str, Any]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {rig.opened.api_key}"}
    async with rig.http.post(f"{rig.url}{path}", json=body, headers=headers) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize(
    ("path", "body"),
    [*WIRES.items(), ("/v1beta/models/m:generateContent", _GOOGLE)],
    ids=["anthropic", "chat", "responses", "google"],
)
async def test_a_call_at_the_engine_ends_with_the_time_of_its_session(
    make_rig: MakeRig, path: str, body: dict[str, Any]
) -> None:
    rig = await make_rig(limits=LIMITS)
    rig.engine.hold = True
    call = asyncio.create_task(post(rig, path, body))
    await rig.engine.asked.wait()
    passes(rig.session.clock, LIMIT)
    status, told = await call
    assert (status, told) == await post(rig, path, body)
    assert status == 403
    assert "wall clock (1000 s); finish now, do not retry" in told
    assert (rig.engine.aborted, len(rig.engine.prompts)) == (1, 1)
    assert rig.session.counters.stopped_by == "wall clock (1000 s)"
    assert rig.session.counters.engine_error == ""
    assert (await rig.gateway.finish(rig.session.id)).samples == rig.kept.turns == []


async def test_a_stream_that_has_begun_is_told_so_too(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=LIMITS, gateway_limits=GatewayLimits(grace=0.0, keepalive=0.05, drain=5.0))
    rig.engine.hold = True
    headers = {"x-api-key": rig.opened.api_key}
    async with rig.http.post(f"{rig.url}/v1/messages", json=ask("hi", stream=True), headers=headers) as reply:
        await reply.content.readuntil(b"ping")
        passes(rig.session.clock, LIMIT)
        told = await reply.text()
    assert "event: error" in told
    assert "do not retry" in told
    assert (rig.engine.aborted, rig.kept.turns) == (1, [])


async def test_the_time_of_a_pause_is_not_the_agents(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=LIMITS)
    clock = rig.session.clock
    await rig.gateway.pause()
    call = asyncio.create_task(rig.messages(ask("a")))
    while not clock._held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    passes(clock, LIMIT - 1)
    rig.gateway.resume()
    assert (await call)[0] == 200
    assert clock.stood >= LIMIT - 1
    passes(clock, LIMIT / 2)
    assert (await rig.messages(ask("b")))[0] == 200
    passes(clock, LIMIT / 2)
    assert (await rig.messages(ask("c")))[0] == 403
    assert rig.session.counters.engine_error == ""


async def test_a_pause_that_does_not_end_is_the_engines_doing(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=LIMITS)
    await rig.gateway.pause()
    call = asyncio.create_task(rig.messages(ask("a")))
    while not rig.session.clock._held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    passes(rig.session.clock, 2 * LIMIT)
    assert (await call)[0] == 403
    assert rig.session.counters.engine_error == "it did not serve this session for 2000 s"
    rig.gateway.resume()


@pytest.mark.parametrize("paused", [True, False])
async def test_a_client_that_leaves_during_a_pause_was_not_served(make_rig: MakeRig, paused: bool) -> None:
    rig = await make_rig()
    rig.engine.hold = True
    if paused:
        await rig.gateway.pause()
    call = asyncio.create_task(rig.messages(ask("a")))
    while not (rig.session.clock._held if paused else rig.engine.asked.is_set()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    call.cancel()
    while not rig.session.counters.abandoned:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert bool(rig.session.counters.engine_error) is paused
    rig.gateway.resume()
    rig.engine.release.set()
    assert (await rig.messages(ask("a")))[0] == 200
    assert rig.session.counters.engine_error == ""


async def test_what_waits_for_room_at_the_engine_waits_at_no_cost(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=LIMITS, gateway_limits=GatewayLimits(engine_tokens=1, engine_retry_delays=()))
    async with AsyncExitStack() as others:
        await others.enter_async_context(rig.gateway.at_engine.wait(1))
        call = asyncio.create_task(rig.messages(ask("a")))
        while not rig.session.clock._held:  # noqa: ASYNC110
            await asyncio.sleep(0)
        passes(rig.session.clock, LIMIT)
    assert (await call)[0] == 200


async def test_the_time_from_a_failed_call_to_the_next_answer_is_not_the_agents(make_rig: MakeRig) -> None:
    said = ["fine", EngineError("down"), EngineError("down"), "fine", "fine"]
    rig = await make_rig(lambda prompt, number: said[number], limits=LIMITS)
    clock = rig.session.clock
    assert (await rig.messages(ask("a")))[0] == 200
    rig.engine.hold = True
    rig.engine.asked.clear()
    call = asyncio.create_task(rig.messages(ask("b")))
    await rig.engine.asked.wait()
    asked = time.monotonic()
    rig.engine.hold = False
    rig.engine.release.set()
    assert (await call)[0] == 529
    assert clock._since is not None
    assert clock._since <= asked
    passes(clock, LIMIT / 2)  # in which the agent waits before it asks again
    assert (await rig.messages(ask("b")))[0] == 529
    passes(clock, LIMIT / 4)
    assert (await rig.messages(ask("b")))[0] == 200
    assert LIMIT * 3 / 4 <= clock.stood < LIMIT
    passes(clock, LIMIT * 3 / 4)
    assert (await rig.messages(ask("c")))[0] == 200
    assert clock.left < LIMIT / 4


async def test_the_time_at_a_lost_replica_is_not_the_agents(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await make_rig(limits=LIMITS)
    sample = rig.engine.generate

    async def generate(*args: Any, **named: Any) -> Generation:
        passes(rig.session.clock, LIMIT / 2)
        return replace(await sample(*args, **named), lost_s=LIMIT / 2)

    monkeypatch.setattr(rig.engine, "generate", generate)
    assert (await rig.messages(ask("a")))[0] == 200
    assert rig.session.clock.stood == pytest.approx(LIMIT / 2)
    assert not rig.session.clock.standing


STEPS = st.lists(
    st.tuples(st.sampled_from(["hold", "free", "failed", "served"]), st.integers(0, 100), st.integers(0, 300)),
    max_size=30,
)


@few
@given(STEPS)
def test_every_second_is_counted_once(steps: list[tuple[str, int, int]]) -> None:
    """Against a list of seconds, each marked where the clock stands; `went` is when it last went on."""
    clock, now, went, standing, holds = Clock(500), 0, 0, set[int](), ExitStack()
    held, failing = 0, False
    for what, seconds, back in steps:
        stood = held or failing
        if what == "hold":
            holds.enter_context(clock.held())
            held += 1
        elif what == "free":
            holds.close()
            held = 0
        elif what == "failed":
            clock.failed(clock._began + now - back)
            failing = True
            standing |= set(range(max(went, now - back), now))
        else:
            clock.served()
            failing = False
        if stood and not (held or failing):
            went = now
        passes(clock, seconds)
        if held or failing:
            standing |= set(range(now, now + seconds))
        now += seconds
        assert clock.stood == pytest.approx(len(standing), abs=0.5)
        assert clock.left == pytest.approx(500 + min(500, len(standing)) - now, abs=0.5)
        assert clock.worn == (clock.stood >= 500)


async def test_who_waits_is_woken_when_it_is_over_and_not_before() -> None:
    rung = asyncio.Event()
    clock = Clock(0.05)
    with clock.held(), pytest.raises(OutOfTimeError):
        async with clock.within(rung.set):
            await asyncio.sleep(30)
    assert clock.stood >= 0.05
    assert rung.is_set()
    clock.begin()
    assert (clock.stood, clock.worn) == (0, False)
    with pytest.raises(TimeoutError, match="another"):
        async with clock.within(rung.set):
            raise TimeoutError("another")
    async with Clock(None).within(rung.set):
        pass
