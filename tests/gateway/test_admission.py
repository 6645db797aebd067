"""What one session may hold of what all share, however its agent behaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sandlot.gateway import SessionLimits, server
from support.rig import MakeRig, Rig, ask


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def post(rig: Rig, body: dict[str, Any], path: str = "/v1/messages") -> int:
    async with rig.http.post(f"{rig.url}{path}", json=body, headers={"x-api-key": rig.opened.api_key}) as reply:
        await reply.read()
        return reply.status


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_requests_are_held_within_bounds_until_they_are_prompts(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    rig = await make_rig()
    arriving = rig.session.bodies.arriving
    arriving.whole = 3 * server._LEAST
    go, rendering, fmt = threading.Event(), threading.Event(), rig.engine.fmt
    render = fmt.render

    def held(*args: Any) -> Any:
        rendering.set()
        assert go.wait(30)
        return render(*args)

    monkeypatch.setattr(fmt, "render", held)
    calls = [asyncio.create_task(post(rig, ask(f"{n} " + "x" * 20_000), path)) for n in range(10)]
    await until(lambda: rendering.is_set() and len(arriving._queue) == 7)
    assert arriving.used == arriving.whole
    assert 60_000 < rig.gateway.reading.used < 64_000
    assert len(rig.session._tasks) <= 3
    go.set()
    assert set(await asyncio.gather(*calls)) == {200}
    assert rig.gateway.reading.used == arriving.used == 0


async def test_a_session_of_thousands_of_requests_has_few_of_them_read_at_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small they are; those whose client has left stand in nobody's way, and are not looked for."""
    rig = await make_rig(limits=SessionLimits(concurrent=64))
    arriving, at_once, most = rig.session.bodies.arriving, 8, 0
    arriving.whole = at_once * server._LEAST
    read = server._Handler._read

    async def watched(*args: Any) -> bytes:
        nonlocal most
        most = max(most, arriving.used // server._LEAST)
        return await read(*args)

    monkeypatch.setattr(server._Handler, "_read", watched)
    async with arriving.wait(arriving.whole):
        calls = [asyncio.create_task(post(rig, ask(f"call {n}"))) for n in range(3 * at_once)]
        await until(lambda: len(arriving._queue) == 3 * at_once)
        for call in calls[::3]:
            call.cancel()
        await asyncio.wait(calls[::3])
        await until(lambda: sum(not turn.cancelled() for _, turn in arriving._queue) == 2 * at_once)
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert set(told[1::3] + told[2::3]) == {200}
    assert most == at_once
    assert rig.gateway.reading.used == arriving.used == len(arriving._queue) == 0


async def test_a_stranger_has_no_connection_to_keep(make_rig: MakeRig) -> None:
    rig = await make_rig()
    for path, key, status in (("/v1/messages", "sk-nobody", 401), ("/v9", rig.opened.api_key, 404)):
        async with rig.http.post(f"{rig.url}{path}", json=ask("go"), headers={"x-api-key": key}) as reply:
            assert (reply.status, reply.headers["Connection"]) == (status, "close")
    async with rig.http.post(f"{rig.url}/v1/messages", json={}, headers={"x-api-key": rig.opened.api_key}) as reply:
        assert (reply.status, reply.headers.get("Connection", "keep-alive")) == (400, "keep-alive")


@pytest.mark.parametrize("count", ["9" * 5_000, "²", "-1", "1e3", "0" * 5_000])
async def test_a_header_that_counts_tries_is_taken_as_it_comes(make_rig: MakeRig, count: str) -> None:
    rig = await make_rig()
    assert (await rig.messages(ask("go"), x_stainless_retry_count=count))[0] == 200


async def test_a_body_that_does_not_come_is_not_waited_for(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BODY_S", 0.1)
    rig = await make_rig()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
    head = f"POST /v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: {rig.opened.api_key}\r\nContent-Length: 900\r\n\r\n"
    writer.write(head.encode() + b'{"messages"')
    async with asyncio.timeout(30):
        head_told, body_told = await reader.readuntil(b"\r\n\r\n"), await reader.readuntil(b"0.1 s")
    assert head_told.startswith(b"HTTP/1.1 400 ")
    assert b"Connection: close" in head_told
    assert b"the request body did not come" in body_told
    writer.close()
    assert rig.gateway.reading.used == rig.session.bodies.arriving.used == 0


async def test_calls_that_wait_are_counted(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=SessionLimits(concurrent=2))
    rig.engine.hold = True
    calls = [asyncio.create_task(post(rig, ask(f"call {n}"))) for n in range(32)]
    await until(lambda: len(rig.session._tasks) == 32)
    assert await post(rig, ask("one more")) == 529
    rig.engine.release.set()
    assert set(await asyncio.gather(*calls)) == {200}
    assert await post(rig, ask("one more")) == 200


async def test_what_is_no_http_is_refused_and_not_logged(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = await make_rig()
    for head in (
        "GET / HTTP/1.1\nX: y\n\n",
        "POST /v1/messages HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}",
        "GET\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
        writer.write(head.encode())
        async with asyncio.timeout(30):
            assert b" 400 " in await reader.readline()
        writer.close()
    assert not caplog.records
