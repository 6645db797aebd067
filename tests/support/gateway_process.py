"""`sandlot gateway` as a process of its own, asked over its control side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass
class Served:
    base_url: str
    control_url: str
    admin_key: str
    run: Path
    process: subprocess.Popen[bytes]
    temporary: Path

    def control(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.admin_key if key is None else key}"}
        return httpx.request(method, f"{self.control_url}{path}", json=body, headers=headers, timeout=60)

    def open(self, **body: Any) -> tuple[str, str]:
        opened = self.control("POST", "/control/sessions", body).json()
        assert opened["base_url"] == self.base_url
        return opened["session_id"], opened["api_key"]


@contextmanager
def gateway_process(
    scratch: Path, model: Path, engine: str = "scripted", workers: int = 1, more: tuple[str, ...] = ()
) -> Iterator[Served]:
    """A gateway over the scripted engine or one at a URL; it must end well when it is told to."""
    log, run = scratch / "gateway.log", scratch / "run"
    temporary = Path(tempfile.mkdtemp(prefix="sandlot-test-", dir="/tmp"))
    command = [sys.executable, "-m", "sandlot.cli", "gateway", "--engine", engine, "--model", str(model), "--json"]
    command += ["--port", "0", "--control-port", "0", "--out", str(run), "--workers", str(workers), *more]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)},
        )
    assert process.stdout is not None
    try:
        text = b""
        while not text.rstrip().endswith(b"}"):
            line = process.stdout.readline()
            assert line, log.read_text()
            text += line
        told = json.loads(text)
        yield Served(told["base_url"], told["control_url"], told["admin_key"], run, process, temporary)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
            assert not list(temporary.iterdir())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(temporary)
