"""Daytona's own SDK against a server that speaks its wire; run by `test_cloud_sdks.py` where that SDK is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("daytona", reason="Daytona's SDK is not installed here")

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.daytona import DaytonaBackend
from support import daytona_server
from support.clouds import Cloud, a_cloud

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = SandboxSpec(image="some-image", network="gateway", limits=Limits(memory=2 << 30, wall_clock=7200))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cloud() -> AsyncIterator[Cloud]:
    async with a_cloud() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def account(cloud: Cloud) -> AsyncIterator[daytona_server.Account]:
    async with daytona_server.serve(cloud) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def backend(cloud: Cloud, account: daytona_server.Account) -> AsyncIterator[DaytonaBackend]:
    made = DaytonaBackend(per_second=1000.0)
    yield made
    await made.close()
    assert [one for one in account.states if account.found(one)] == []
    assert (cloud.running, cloud.frozen) == ({}, {})
    cloud.created.clear()


async def test_what_is_asked_by_the_wire(backend: DaytonaBackend, cloud: Cloud) -> None:
    async with await backend.create(SPEC) as sandbox:
        (asked,) = cloud.created
        assert (asked["user"], asked["memory"], asked["networkBlockAll"]) == ("root", 2, True)
        assert (asked["autoStopInterval"], asked["autoDeleteInterval"], asked["ttlMinutes"]) == (0, 0, 121)
        assert (await sandbox.exec("echo out; echo err >&2; exit 3")).exit_code == 3
        assert await sandbox._call("echo out; echo err >&2", 10.0) == (0, "out\nerr\n")  # which the daemon mixes


async def test_the_gateway_is_reached_over_the_sdks_sessions(backend: DaytonaBackend) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % len(await reader.readuntil(b"end\n")) * 100_000)
        await writer.drain()
        writer.close()

    ask = "exec 3<>/dev/tcp/127.0.0.1/8400 && { head -c $1 /dev/zero; echo end; } >&3 && cat <&3 | wc -c"
    several = f"set -- 9995; for n in 1 2 3 4 5 6; do ( {ask} ) & done; wait"
    async with (
        await backend.create(SPEC) as sandbox,
        await asyncio.start_server(answer, sock=sandbox.listen(8400), limit=1 << 20),
    ):
        assert (await sandbox.exec(["bash", "-c", several])).stdout == b"400000\n" * 6
        (relay,) = sandbox._relays
        before = relay.pid
        await sandbox.kill_processes()
        assert (await sandbox.exec(["bash", "-c", ask, "bash", "100000"])).stdout == b"600000\n"
        assert relay.pid == before, "it lives on with what the daemon runs beside it"
        await sandbox.exec(["kill", "-9", str(before)], user="root")
        async with asyncio.timeout(60):
            while relay.pid in (0, before):  # noqa: ASYNC110 it has no event for that
                await asyncio.sleep(0.05)
        assert (await sandbox.exec(["bash", "-c", ask, "bash", "9995"])).stdout == b"400000\n"


async def test_what_does_not_start_is_removed(backend: DaytonaBackend, account: daytona_server.Account) -> None:
    account.fails = "no runner has room"
    try:
        with pytest.raises(SandboxError, match="no runner has room"):
            await backend.create(SPEC)
    finally:
        account.fails = ""
    assert account.states == {}


async def test_a_dockerfile_is_built_and_takes_nothing_from_elsewhere(
    backend: DaytonaBackend, cloud: Cloud, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("of this machine")
    (tmp_path / "task").mkdir()
    spec = SandboxSpec(image=f"dockerfile:{tmp_path}/task")
    with pytest.raises(SandboxUnavailableError, match=r"Dockerfile .* does not exist"):
        await backend.create(spec)
    text = "FROM debian:12\nRUN touch /made\n"
    (tmp_path / "task" / "Dockerfile").write_text(text)
    async with await backend.create(spec):
        assert cloud.created[0]["buildInfo"]["dockerfileContent"] == text
    (tmp_path / "task" / "Dockerfile").write_text("FROM debian:12\nCOPY ../secret /\n")
    with pytest.raises(SandboxError, match="outside") as told:
        await backend.create(spec)
    assert not told.value.retryable


async def test_a_snapshot_that_is_gone_is_no_lost_sandbox(backend: DaytonaBackend) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"cannot boot snapshot:none.*not found"):
        await backend.create(SandboxSpec(image="snapshot:none"))
    snapshot = await (await backend.create(SPEC)).snapshot()
    name = snapshot.source.removeprefix("snapshot:")
    await backend._client.snapshot.delete(name)
    await snapshot.discard()


async def test_errors_of_the_sdk_are_told(
    backend: DaytonaBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await backend.create(SPEC) as sandbox:
        await cloud.end(sandbox.id)
        with pytest.raises(SandboxLostError, match="gone"):  # the daemon's proxy has nothing but a bad request for that
            await sandbox.exec(["true"])
    monkeypatch.setenv("DAYTONA_API_KEY", "dtn_" + "1" * 64)
    stranger = DaytonaBackend(per_second=1000.0)
    with pytest.raises(SandboxError, match="DaytonaAuthenticationError") as told:
        await stranger.create(SPEC)
    assert not told.value.retryable
    assert [check.ok for check in await stranger.doctor()] == [False]
    with pytest.raises(SandboxError, match=r"cannot list its sandboxes.*Invalid credentials"):
        await stranger.sweep()
    await stranger.close()
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(SandboxError, match="Set DAYTONA_API_KEY"):
        await DaytonaBackend(per_second=1000.0).create(SPEC)
