"""Modal's own SDK against a server that speaks its wire; run by `test_cloud_sdks.py` where that SDK is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("modal", reason="Modal's SDK is not installed here")

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.modal import ModalBackend
from support import modal_server
from support.clouds import Cloud, a_cloud, check_streams

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = SandboxSpec(image="some-image", network="gateway")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cloud() -> AsyncIterator[Cloud]:
    async with a_cloud() as made, modal_server.serve(made):
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def backend(cloud: Cloud) -> AsyncIterator[ModalBackend]:
    made = ModalBackend(per_second=1000.0)
    yield made
    await made.close()
    assert cloud.running == {}
    cloud.created.clear()


async def test_the_gateway_is_reached_over_the_sdks_streams(backend: ModalBackend) -> None:
    await check_streams(backend)


async def test_a_lost_answer_starts_nothing_twice(backend: ModalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    start = modal_server.CommandRouter.TaskExecStart

    async def lose(self: modal_server.CommandRouter, request: Any) -> Any:
        answer = await start(self, request)
        if request.exec_id not in lost:
            lost.append(request.exec_id)
            raise GRPCError(Status.UNAVAILABLE, "the answer was lost")
        return answer

    async with await backend.create(SPEC) as sandbox:
        monkeypatch.setattr(modal_server.CommandRouter, "TaskExecStart", lose)
        assert (await sandbox.exec("echo 1 >>count; cat count")).stdout == b"1\n"
        assert len(lost) > 2


async def test_a_dockerfile_is_sent_with_its_directory(backend: ModalBackend, cloud: Cloud, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nCOPY . /code\nRUN touch /made\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "code.txt").write_text("the code\n")
    async with await backend.create(SandboxSpec(image=f"dockerfile:{tmp_path}")):
        (asked,) = cloud.created
        assert asked["image"] == "debian:12\nCOPY . /code\nRUN touch /made"
        assert asked["context"]["/below/code.txt"] == b"the code\n"


async def test_long_commands_and_any_bytes_pass(backend: ModalBackend) -> None:
    async with await backend.create(SPEC) as sandbox:
        for size in (20_000, 50_000, 100_000):
            assert (
                await sandbox.exec(["sh", "-c", 'printf %s "$1" | wc -c', "sh", "x" * size])
            ).stdout == b"%d\n" % size
        data = bytes(range(256)) * 20_000
        await sandbox.write_file("data", data)
        assert await sandbox.read_file("data") == data
        assert (await sandbox._call(r"printf '\377\n'", 10.0)) == (0, "\ufffd\n")


async def test_what_ended_while_it_was_listed_is_passed_over(
    backend: ModalBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.create(SPEC)
    async with await backend.create(SPEC) as sandbox:
        cloud.created[1]["metadata"]["sandlot.until"] = "1000"
        tags = modal_server.ControlPlane.SandboxTagsGetV2

        async def end(self: modal_server.ControlPlane, request: Any) -> Any:
            if request.sandbox_id != sandbox.id:
                await cloud.end(request.sandbox_id)
                raise cloud.gone(request.sandbox_id)
            return await tags(self, request)

        monkeypatch.setattr(modal_server.ControlPlane, "SandboxTagsGetV2", end)
        assert await backend.sweep() == 1
        with pytest.raises(SandboxLostError, match="gone"):
            await sandbox.exec(["true"])


async def test_errors_of_the_sdk_are_told(backend: ModalBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(**how: object) -> str:
        raise OSError("the quota is used up")

    with monkeypatch.context() as context:
        context.setattr(cloud, "boot", refuse)
        with pytest.raises(SandboxError, match="the quota is used up"):
            await backend.create(SPEC)
    failed = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE, exception="no such file")

    async def fail(self: modal_server.ControlPlane, request: Any) -> Any:
        return api_pb2.ImageGetOrCreateResponse(image_id="im-none", result=failed)

    with monkeypatch.context() as context:
        context.setattr(modal_server.ControlPlane, "ImageGetOrCreate", fail)
        with pytest.raises(SandboxUnavailableError, match=r"cannot build the image.*no such file"):
            await backend.create(SPEC)
    async with await backend.create(SPEC) as sandbox:
        with monkeypatch.context() as context:
            context.setattr(modal_server.CommandRouter, "let_in", lambda self, metadata: False)
            with pytest.raises(SandboxError, match="AuthError") as told:
                await sandbox.exec(["true"])
            assert not told.value.retryable
        await cloud.end(sandbox.id)
        with pytest.raises(SandboxLostError, match="gone"):
            await sandbox.exec(["true"])
