"""E2B's own SDK against a server that speaks its wire; run by `test_cloud_sdks.py` where that SDK is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("e2b", reason="E2B's SDK is not installed here")

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.e2b import E2BBackend
from sandlot.sandbox.remote import owner
from support.backends import HostImage, opened
from support.clouds import check_streams

SPEC = SandboxSpec(image="some-image", env={"GIVEN": "1"}, labels={"run": "r1"}, limits=Limits(wall_clock=7200))


@pytest_asyncio.fixture
async def host() -> AsyncIterator[HostImage]:
    async with opened("e2b-sdk") as made:
        yield made


async def test_what_is_asked_by_the_wire(host: HostImage) -> None:
    async with await host.create(SPEC) as sandbox:
        assert (await sandbox.exec("whoami; echo $GIVEN; pwd")).stdout == b"agent\n1\n/workspace\n"
        (asked,) = host.cloud.created
        assert (asked["image"], asked["seconds"], asked["env"]) == ("some-image", 7200, {"GIVEN": "1"})
        assert asked["network"] == {"deny_out": ["0.0.0.0/0"]}
        assert asked["metadata"]["run"] == "r1"
        assert not owner.is_dead(asked["metadata"])
        assert [check.ok for check in await host.doctor()] == [True]
        assert await host.sweep() == 0
        asked["metadata"]["sandlot.until"] = "1000"
        assert await host.sweep() == 1
        with pytest.raises(SandboxLostError, match="gone"):
            await sandbox.exec(["true"])
    assert host.cloud.running == {}


async def test_the_gateway_is_reached_over_the_sdks_streams(host: HostImage) -> None:
    await check_streams(host)


async def test_errors_of_the_sdk_are_told(host: HostImage, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = host.cloud.gone

    async def refuse(**how: Any) -> str:
        raise gone("never")

    monkeypatch.setattr(host.cloud, "boot", refuse)
    with pytest.raises(SandboxError):
        await host.create(SPEC)
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "1" * 40)
    with pytest.raises(SandboxError, match="AuthenticationException") as told:
        await E2BBackend(per_second=1000.0).create(SPEC)
    assert not told.value.retryable
    with pytest.raises(SandboxUnavailableError):
        await host.create(SandboxSpec(image="/some/file"))
