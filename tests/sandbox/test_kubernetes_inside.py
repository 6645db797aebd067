"""agent-sandbox's own SDK against a server that speaks a cluster's wire; run by `test_cloud_sdks.py` where it is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("k8s_agent_sandbox", reason="Kubernetes' agent-sandbox SDK is not installed here")

from k8s_agent_sandbox.models import SandboxGatewayConnectionConfig, SandboxInClusterConnectionConfig

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.kubernetes import KubernetesBackend
from support import kubernetes_server
from support.clouds import Cloud, a_cloud

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = SandboxSpec(image="some-pool", env={"GIVEN": "1"}, labels={"group id": "é one of 2/", "empty": ""})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cloud() -> AsyncIterator[Cloud]:
    async with a_cloud() as made, kubernetes_server.serve(made):
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def backend(cloud: Cloud) -> AsyncIterator[KubernetesBackend]:
    made = KubernetesBackend(isolated=True, router=cloud.url, per_second=1000.0)
    yield made
    await made.close()
    assert cloud.running == {}
    cloud.created.clear()


async def test_what_is_asked_by_the_wire(backend: KubernetesBackend, cloud: Cloud) -> None:
    async with await backend.create(SPEC) as sandbox:
        (asked,) = cloud.created
        assert asked["metadata"].items() >= {"group-id": "one-of-2", "empty": ""}.items()
        assert (await sandbox.exec("whoami; echo $GIVEN")).stdout == b"agent\n1\n"  # without an env in the claim
        assert (await sandbox.exec(["sh", "-c", "cat; exit 3"], stdin=b"\xff\0" * 50_000)).stdout == b"\xff\0" * 50_000
        assert [check.detail for check in await backend.doctor()] == ["1 sandboxes in default"]
    assert backend._client._active_connection_sandboxes == {}, "the SDK keeps nothing of what has ended"


async def test_a_pool_that_is_not_there_is_refused(backend: KubernetesBackend) -> None:
    with pytest.raises(SandboxUnavailableError, match=f"cannot boot {kubernetes_server.NO_POOL}.*does not exist"):
        await backend.create(SandboxSpec(image=kubernetes_server.NO_POOL))


async def test_a_pod_that_is_gone_is_a_lost_sandbox(backend: KubernetesBackend, cloud: Cloud) -> None:
    async with await backend.create(SPEC) as sandbox:
        await cloud.end(sandbox.id)
        with pytest.raises(SandboxLostError, match="gone"):  # the router only says that it could not connect
            await sandbox.exec(["true"])


async def test_errors_of_the_sdk_are_told(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_AUTH_TOKEN", "another")
    stranger = KubernetesBackend(isolated=True, router=cloud.url, per_second=1000.0)
    with pytest.raises(SandboxError, match="Failed to communicate") as told:
        await stranger.create(SPEC)
    assert not told.value.retryable
    assert cloud.running == {}
    await stranger.close()


async def test_the_ways_to_sandboxes() -> None:
    inside, outside = KubernetesBackend(isolated=True), KubernetesBackend(isolated=True, gateway="edge/front")
    assert isinstance(inside._sdk().connection_config, SandboxInClusterConnectionConfig)
    way = outside._sdk().connection_config
    assert isinstance(way, SandboxGatewayConnectionConfig)
    assert (way.gateway_namespace, way.gateway_name) == ("edge", "front")
    await inside.close()
    await outside.close()
