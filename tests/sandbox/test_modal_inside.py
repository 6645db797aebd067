"""Modal's own SDK against a server that speaks its wire; run by `test_cloud_sdks.py` where that SDK is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("modal", reason="Modal's SDK is not installed here")

from grpclib import GRPCError, Status

from sandlot.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.modal import ModalBackend
from support import modal_server
from support.fake_clouds import GONE, Cloud

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = SandboxSpec(image="some-image", network="gateway")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cloud() -> AsyncIterator[Cloud]:
    local = LocalBackend()
    made = Cloud(local, gone=GONE["modal"])
    async with modal_server.serve(made):
        yield made
    await made.close()
    await local.close()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(cloud: Cloud) -> AsyncIterator[ModalBackend]:
    made = ModalBackend(per_second=1000.0)
    yield made
    await made.close()
    assert cloud.running == {}
    cloud.created.clear()


async def test_the_gateway_is_reached_over_the_sdks_streams(backend: ModalBackend) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()) * 200_000)
        await writer.drain()
        writer.close()

    ask = "exec 3<>/dev/tcp/127.0.0.1/8400 && echo hello >&3 && cat <&3 | wc -c"
    several = f"for n in 1 2 3 4 5 6; do ( {ask} ) & done; wait"
    async with (
        await backend.create(SPEC) as sandbox,
        await asyncio.start_server(answer, sock=sandbox.listen(8400)),
    ):
        assert (await sandbox.exec(["bash", "-c", several])).stdout == b"1200000\n" * 6
        await sandbox.kill_processes()
        assert (await sandbox.exec(["bash", "-c", ask])).stdout == b"1200000\n"


async def test_a_lost_answer_starts_nothing_twice(backend: ModalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    start = modal_server.CommandRouter.TaskExecStart

    async def lose(self: modal_server.CommandRouter, request: object) -> object:
        answer = await start(self, request)
        if request.exec_id not in lost:  # type: ignore[attr-defined]
            lost.append(request.exec_id)  # type: ignore[attr-defined]
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


async def test_errors_of_the_sdk_are_told(backend: ModalBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(**how: object) -> str:
        raise OSError("the quota is used up")

    with monkeypatch.context() as context:
        context.setattr(cloud, "boot", refuse)
        with pytest.raises(SandboxError, match="the quota is used up"):
            await backend.create(SPEC)
    with pytest.raises(SandboxUnavailableError):
        await backend.create(SandboxSpec(image="/some/file"))
    async with await backend.create(SPEC) as sandbox:
        with monkeypatch.context() as context:
            context.setattr(modal_server.CommandRouter, "let_in", lambda self, metadata: False)
            with pytest.raises(SandboxError, match="AuthError") as told:
                await sandbox.exec(["true"])
            assert not told.value.retryable
        await cloud.end(sandbox.id)
        with pytest.raises(SandboxLostError, match="gone"):
            await sandbox.exec(["true"])
