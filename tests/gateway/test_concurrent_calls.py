"""Several calls of one session at once: nothing is sampled twice, nothing beyond a limit, and what is told is true."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from sandlot.gateway import SessionLimits
from sandlot.gateway.wire import ChatRequest, WireError
from sandlot.gateway.wire.anthropic import AnthropicWire
from support.rig import MakeRig, Rig, ask


def asked(*texts: str, **more: Any) -> ChatRequest:
    return AnthropicWire().parse(ask(*texts, **more), {})


async def told(rig: Rig, *texts: str, **more: Any) -> str:
    """The turn that answers these words."""
    call = rig.session.call(asked(*texts, **more), "toolu_")
    with call:
        answer = await call.result()
    return str(answer.turn_id)


async def at_engine(rig: Rig, calls: int) -> None:
    """Wait until so many calls have reached the engine."""
    while len(rig.engine.prompts) < calls:
        rig.engine.asked.clear()
        await rig.engine.asked.wait()


def held(rig: Rig) -> tuple[asyncio.Event, threading.Event]:
    """Has turns wait while they are recorded: set when one does, and what to set so that they go on."""
    recording, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def wait(turn: Any) -> None:
        loop.call_soon_threadsafe(recording.set)
        go_on.wait(30)

    rig.kept.on_turn = wait
    return recording, go_on


@pytest.mark.parametrize("limit", [10, 25, 100])
async def test_calls_in_flight_never_sample_beyond_the_budget(make_rig: MakeRig, limit: int) -> None:
    """Each may be answered with 9 tokens at most and takes 6 of them; the one that takes the rest may be cut."""
    rig = await make_rig(lambda prompt, number: "a b c d e", limits=SessionLimits(tokens=limit))
    rig.engine.hold = True
    calls = [rig.session.call(asked(f"question {n}", max_tokens=9), "toolu_") for n in range(20)]
    await asyncio.gather(*(call.ready() for call in calls))
    await at_engine(rig, max(1, min(limit // 9, rig.session.limits.concurrent)))
    rig.engine.release.set()
    answers = await asyncio.gather(*(call.result() for call in calls), return_exceptions=True)
    taken = [len(turn.output_ids) for turn in rig.session.turns]
    assert sum(taken) == rig.session.counters.sampled_tokens == limit
    assert max(taken) == len(rig.engine.fmt.encode("a b c d e")) + 1
    refused = [answer for answer in answers if isinstance(answer, WireError)]
    assert len(refused) == 20 - len(taken)
    assert {error.kind for error in refused} == {"budget"}
    assert rig.session.counters.stopped_by == f"sampled tokens ({limit})"


async def test_a_call_waits_for_tokens_that_others_may_leave(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=SessionLimits(tokens=25))
    rig.engine.hold = True
    calls = [rig.session.call(asked(f"question {n}", max_tokens=10), "toolu_") for n in range(3)]
    await asyncio.gather(*(call.ready() for call in calls))
    await at_engine(rig, 2)
    assert len(rig.engine.prompts) == 2
    rig.engine.release.set()
    await asyncio.gather(*(call.result() for call in calls))
    assert len(rig.engine.prompts) == 3
    assert rig.session.counters.sampled_tokens < 25


async def test_calls_that_name_no_bound_do_not_wait_for_each_other(make_rig: MakeRig) -> None:
    """Each could fill the context, which the budget would hold but once."""
    rig = await make_rig(limits=SessionLimits(tokens=200_000))
    rig.engine.hold = True
    calls = [rig.session.call(asked(f"question {n}", max_tokens=1_000_000), "toolu_") for n in range(3)]
    await asyncio.gather(*(call.ready() for call in calls))
    await at_engine(rig, 2)
    assert len(rig.engine.prompts) == 2
    rig.engine.release.set()
    await asyncio.gather(*(call.result() for call in calls))
    held = [turn.sampling["max_tokens"] for turn in rig.session.turns]
    assert held[1] == 200_000 - held[0]


async def test_a_call_that_leaves_gives_its_tokens_back(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=SessionLimits(tokens=10))
    rig.engine.hold = True
    with rig.session.call(asked("leaves"), "toolu_"):
        await at_engine(rig, 1)
        waiting = asyncio.create_task(told(rig, "stays"))
    await at_engine(rig, 2)
    rig.engine.release.set()
    turn = await waiting
    assert [t.id for t in rig.session.turns] == [turn]


@pytest.mark.parametrize("history", [(), ("hi", "reply 0")])
async def test_of_calls_at_once_the_later_ones_are_told_as_forks(make_rig: MakeRig, history: tuple[str, ...]) -> None:
    """Of a session's first requests, and of those that go on from one turn, all but one are forks."""
    rig = await make_rig()
    if history:
        await told(rig, *history[:1])
    rig.engine.hold = True
    before = len(rig.engine.prompts)
    sent = [asyncio.create_task(told(rig, *history, f"way {n}")) for n in range(3)]
    await at_engine(rig, before + 3)
    rig.engine.release.set()
    await asyncio.gather(*sent)
    forks = [turn.fork for turn in rig.session.turns[before:]]
    assert forks[0] == ""
    assert all(f"message {len(history)} (user) differs: 'way" in fork for fork in forks[1:])
    assert [reason for _, reason in rig.session.forks] == forks[1:]


async def test_the_same_request_while_its_answer_is_recorded_joins_it(make_rig: MakeRig) -> None:
    """Its client went when all was sampled: that is kept, and given to who asks again."""
    rig = await make_rig()
    recording, go_on = held(rig)
    first = rig.session.call(asked("hi"), "toolu_")
    with first:
        await recording.wait()
    second = rig.session.call(asked("hi"), "toolu_")
    go_on.set()
    with second:
        answer = await second.result()
    assert second is first
    assert [turn.id for turn in rig.session.turns] == [answer.turn_id]
    assert (rig.session.counters.joined, rig.session.counters.abandoned) == (1, 0)


async def test_of_two_answers_alike_the_one_that_came_is_gone_on_from(make_rig: MakeRig) -> None:
    """Without ids there is only their text, which some clients trim."""
    said = ["Done.", "Done.\n", "Done. \n"]
    rig = await make_rig(lambda prompt, number: said[number % 3])
    turns = [await told(rig, "hi", max_tokens=100 + n) for n in range(3)]
    for n, text in enumerate(said):
        await told(rig, "hi", text, f"and {n}")
        assert rig.session.turns[-1].parent == turns[n]
    await told(rig, "hi", " Done.", "trimmed")
    assert rig.session.turns[-1].parent == turns[0]


async def test_a_history_means_the_same_when_another_answer_fits_it_better(make_rig: MakeRig) -> None:
    said = ["Done.\n", "reply", "Done.", "reply"]
    rig = await make_rig(lambda prompt, number: said[number])
    trimmed = await told(rig, "hi"), await told(rig, "hi", "Done.", "on")
    await told(rig, "hi", max_tokens=100)
    for n in range(5):  # others' requests, so that nothing is remembered of the first one's
        rig.session._continuity.match(asked(f"other {n}").messages, asked("hi").tools)
    later = await told(rig, "hi", "Done.", "on", "reply", "on")
    assert rig.session.tree.path(later) == [*trimmed, later]


async def test_a_session_that_is_sealed_while_an_answer_is_recorded_gives_it_to_nobody(make_rig: MakeRig) -> None:
    """What was sampled stays in the record, as a turn that no client had."""
    rig = await make_rig()
    recording, go_on = held(rig)
    asking = asyncio.create_task(rig.messages(ask("hi")))
    await recording.wait()
    finishing = asyncio.create_task(rig.gateway.finish(rig.session.id))
    await asyncio.sleep(0)
    go_on.set()
    (status, _), finished = await asking, await finishing
    assert (status, finished.samples, finished.report.undelivered) == (403, [], 1)


@pytest.mark.parametrize("broken", ["first", "second"])
async def test_one_of_two_connections_that_breaks_takes_nothing_from_the_other(make_rig: MakeRig, broken: str) -> None:
    rig = await make_rig()
    turn = await told(rig, "hi")
    first, second = rig.session.delivering(turn), rig.session.delivering(turn)
    first.__enter__()
    second.__enter__()
    error = ConnectionResetError("gone")
    breaks, arrives = (first, second) if broken == "first" else (second, first)
    assert not arrives.__exit__(None, None, None)
    assert not breaks.__exit__(ConnectionResetError, error, None)
    assert turn in rig.session.delivered_turns
    finished = await rig.gateway.finish(rig.session.id)
    assert rig.kept.delivered_ids == [turn]
    assert len(finished.samples) == 1


async def test_a_session_that_is_sealed_waits_for_last_bytes_but_not_for_ever(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandlot.gateway.session._LAST_BYTES_S", 0.2)
    rig = await make_rig()
    quick, stuck = await told(rig, "one"), await told(rig, "two")
    writing, hangs = rig.session.delivering(quick), rig.session.delivering(stuck)
    writing.__enter__()
    hangs.__enter__()
    asyncio.get_running_loop().call_soon(writing.__exit__, None, None, None)
    finished = await rig.gateway.finish(rig.session.id)
    hangs.__exit__(None, None, None)
    await rig.session.seal(1)
    assert rig.kept.delivered_ids == [quick]
    assert [span.turn_id for sample in finished.samples for span in sample.spans] == [quick]
