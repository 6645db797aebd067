"""An engine process serves when it says so, says why it cannot, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import aiohttp
import pytest

from sandlot.engine import SamplingParams
from sandlot.engine.process import EngineProcess, default_threads
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import EngineError
from support.engines import until_running
from support.toy_model import make_toy_model


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while alive(pid):  # noqa: ASYNC110 - it is no child of this process
            await asyncio.sleep(0.02)


async def test_it_serves_and_is_gone_afterwards(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with EngineProcess(toy) as engine:
        pid = engine.pid
        assert pid is not None
        assert os.getpgid(pid) == pid
        assert os.listdir(tmp_path) == []
        client = VllmEngine(engine.url)
        done = await client.generate([1, 2, 3], SamplingParams(max_tokens=3), request_id="r", session_id="s")
        assert len(done.output_ids) <= 3
        await client.close()
    assert not alive(pid)


async def test_a_model_that_cannot_be_loaded_is_said_in_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    with pytest.raises(EngineError, match=r"embedded engine ended at its start.*config\.json does not exist") as e:
        await EngineProcess(tmp_path, log_file=log).start()
    assert not e.value.retryable
    assert "\n" not in str(e.value)
    assert "does not exist" in log.read_text()


async def test_a_script_is_needed_and_checked(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--script FILE"):
        await EngineProcess(toy, kind="scripted").start()
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(EngineError, match="scripts"):
        await EngineProcess(toy, kind="scripted", script=tmp_path / "s.json").start()


async def test_a_taken_port_is_said(toy: Path) -> None:
    async with EngineProcess(toy) as engine:
        port = int(engine.url.rsplit(":", 1)[1])
        with pytest.raises(EngineError, match="address already in use"):
            await EngineProcess(toy, port=port).start()


async def test_waiting_tells_that_it_was_killed(toy: Path) -> None:
    async with EngineProcess(toy) as engine:
        assert engine.pid is not None
        watch = asyncio.ensure_future(engine.wait())
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"ended \(exit -9\)"):
            await watch


async def test_it_dies_with_a_parent_that_is_killed(toy: Path) -> None:
    parent = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from sandlot.engine.process import EngineProcess

        async def main():
            async with EngineProcess(Path(sys.argv[1])) as engine:
                print(engine.pid, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, str(toy), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert alive(pid)
    process.kill()
    await process.wait()
    await gone(pid)


async def test_stopping_does_not_wait_for_what_runs(toy: Path) -> None:
    async with EngineProcess(toy) as engine:
        client = VllmEngine(engine.url)
        sampling = SamplingParams(max_tokens=100_000, top_k=1)  # it never ends by itself
        task = asyncio.ensure_future(client.generate([1, 2], sampling, request_id="r", session_id="s"))
        await until_running(engine.url, lambda n: n == 1)
        async with asyncio.timeout(4):
            await engine.stop()
        with pytest.raises(EngineError):
            await task
        await client.close()


async def test_the_server_refuses_what_it_would_otherwise_ignore(toy: Path) -> None:
    async with EngineProcess(toy) as engine, aiohttp.ClientSession(engine.url) as session:
        for change, says in (
            ({"sampling_params": {"stop": ["x"]}}, "stop"),
            ({"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
            ({"sampling_params": {"n": 2}}, "n"),
            ({"sampling_params": {"temperature": -1}}, "temperature"),
            ({"sampling_params": None}, "sampling_params"),
            ({"stream": True}, "stream"),
            ({"output_mode": "text"}, "output_mode"),
            ({"token_ids": []}, "token_ids"),
            ({"token_ids": [-1]}, "token_ids"),
            ({"token_ids": ["a"]}, "token_ids"),
        ):
            body = {"token_ids": [1, 2], "sampling_params": {}, **change}
            async with session.post("/inference/v1/generate", json=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (400, 400)
                assert says in error["message"]
        async with session.post("/inference/v1/generate", data=b"{") as response:
            assert response.status == 400
        async with session.get("/nothing") as response:
            assert response.status == 404
        async with session.get("/health") as response:
            assert response.status == 200


def test_threads_leave_room_for_the_agents() -> None:
    assert 1 <= default_threads() <= max(1, (os.cpu_count() or 2) // 2)
