"""Weight updates through the control side: a running call is cut off at a real engine and becomes one turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from sandlot.chat.format import load_chat_format
from sandlot.engine.base import Generation, SamplingParams
from sandlot.engine.embedded.backend import EmbeddedBackend
from sandlot.engine.resumable import joined
from sandlot.engine.server import make_app
from sandlot.engine.vllm import VllmEngine
from sandlot.gateway import Gateway, GatewayLimits, Policy
from sandlot.gateway.control import control_app
from sandlot.rollout.recorder import JournalRecorder
from sandlot.trajectory.journal import JournalWriter, read_journal
from sandlot.trajectory.records import SessionRecord
from support import engines
from support.rig import Kept, MakeRig, ask
from support.toy_model import make_toy_model

ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Gateway, EmbeddedBackend, VllmEngine]]:
    model = make_toy_model(tmp_path / "model")
    backend = EmbeddedBackend.load(model, max_context=8192)
    async with TestServer(make_app(backend)) as server:
        engine = VllmEngine(str(server.make_url("")))
        # The toy model's likeliest tokens go round in a circle, so a turn lasts until its bound.
        sampling = SamplingParams(max_tokens=700, top_k=1)
        policy = Policy(engine, load_chat_format(model), "toy", sampling, 8192, "processed")
        async with Gateway(policy, limits=GatewayLimits(engine_retry_delays=())) as gateway:
            yield gateway, backend, engine
        await engine.close()
    await backend.close()


async def test_a_call_cut_off_by_a_weight_update_becomes_one_proven_turn(
    served: tuple[Gateway, EmbeddedBackend, VllmEngine],
) -> None:
    gateway, backend, engine = served
    kept = Kept()
    opened = gateway.open(recorder=kept)
    url = f"http://127.0.0.1:{await gateway.serve()}"
    control = f"http://127.0.0.1:{await gateway.serve_app(control_app(gateway, 'admin', url), '127.0.0.1', 0)}"
    async with aiohttp.ClientSession() as http:

        async def turn() -> int:
            headers = {"x-api-key": opened.api_key}
            async with http.post(f"{url}/v1/messages", json=ask("go on", tools=False), headers=headers) as reply:
                await reply.read()
                return reply.status

        call = asyncio.create_task(turn())
        # Cut before its first token, it would be of one version.
        await engines.until_running(engine.base_url, lambda n: n == 1 and any(job.output for job in backend._jobs))
        async with http.post(f"{control}/control/pause", json={"mode": "abort"}, headers=ADMIN) as reply:
            assert (reply.status, await reply.json()) == (200, {"paused": True})
        assert backend.running() == 0
        assert not call.done()
        assert kept.turns == []
        backend.weight_version = "after"
        async with http.post(f"{control}/control/resume", json={"weight_version": "after"}, headers=ADMIN) as reply:
            assert (await reply.json())["weight_version"] == "after"
        assert await call == 200
        async with http.post(f"{control}/control/pause", json={"mode": "now"}, headers=ADMIN) as reply:
            assert reply.status == 400
    (told,) = kept.turns
    assert len(told.output_ids) == len(told.logprobs) == 700
    assert [v[0] for v in told.versions] == ["0", "after"]
    assert (told.versions[0][1], told.versions[-1][2]) == (0, 700)
    assert told.versions[0][2] == told.versions[1][1]
    finished = await gateway.finish(opened.session.id, reward=1.0)
    assert finished.report.sampled == finished.report.trained == 700


async def test_a_session_that_is_finished_while_paused_leaves_no_half_turn(
    served: tuple[Gateway, EmbeddedBackend, VllmEngine],
) -> None:
    gateway, backend, engine = served
    kept = Kept()
    opened = gateway.open(recorder=kept)
    url = f"http://127.0.0.1:{await gateway.serve()}"
    async with aiohttp.ClientSession() as http:
        headers = {"x-api-key": opened.api_key}
        body = ask("go on", tools=False)
        call = asyncio.create_task(http.post(f"{url}/v1/messages", json=body, headers=headers))
        await engines.until_running(engine.base_url, lambda n: n == 1)
        await gateway.pause("abort")
        finished = await gateway.finish(opened.session.id)
        async with await call as reply:
            assert reply.status == 403
    gateway.resume()
    assert kept.turns == finished.samples == []
    assert backend.running() == 0


async def test_an_engine_that_cannot_abort_refuses_that_mode(make_rig: MakeRig) -> None:
    rig = await make_rig()
    control = f"{await rig.gateway.serve_app(control_app(rig.gateway, 'admin', rig.url), '127.0.0.1', 0)}"
    where = f"http://127.0.0.1:{control}/control/pause"
    async with rig.http.post(where, json={"mode": "abort"}, headers=ADMIN) as reply:
        assert reply.status == 409
        assert "mode drain" in (await reply.json())["error"]
    assert (await rig.messages(ask("a")))[0] == 200
    async with rig.http.post(where, headers=ADMIN) as reply:
        assert reply.status == 200
    rig.gateway.resume()


async def test_routed_experts_stand_in_the_journal(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    sample = rig.engine.generate

    async def generate(*args: Any, **named: Any) -> Generation:
        one, two = [replace(await sample(*args, **named), routed_experts=text) for text in ("AA", "BB")]
        return joined([replace(one, finish_reason="abort"), two], "stop", None)

    monkeypatch.setattr(rig.engine, "generate", generate)
    journal = JournalWriter(tmp_path / "e.jsonl.gz")
    journal.append(SessionRecord(episode_id="e", group_id="g"))
    opened = rig.gateway.open("e", recorder=JournalRecorder(journal))
    headers = {"x-api-key": opened.api_key}
    async with rig.http.post(f"{rig.url}/v1/messages", json=ask("hi"), headers=headers) as reply:
        assert reply.status == 200
    assert len((await rig.gateway.finish("e")).samples) == 1
    journal.close()
    (turn,) = read_journal(journal.path).turns
    half = len(turn.output_ids) // 2
    assert turn.metadata["routed_experts"] == [[half, "AA"], [2 * half, "BB"]]
