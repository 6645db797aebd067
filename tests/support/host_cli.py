"""Runs an agent CLI on the host itself: shared layers, a fresh home and workdir, an empty environment, no sandbox."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandlot.harness import Command, Endpoint, Harness
from sandlot.sandbox import AGENT_USER, ExecResult

HOME = "/home/agent"


@dataclass
class HostFiles:
    """As much of a sandbox as `Harness.configure` needs: it writes below `home` what is meant for the agent's home."""

    home: Path

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644, user: str = AGENT_USER) -> None:
        assert path.startswith(HOME + "/"), path
        target = self.home / path.removeprefix(HOME + "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)


async def run_on_host(
    harness: Harness, endpoint: Endpoint, prompt: str, tmp_path: Path, *, timeout: float = 120.0
) -> ExecResult:
    """One unattended run with `home`, `work` and `tmp` below `tmp_path`."""
    home, work, scratch = (tmp_path / name for name in ("home", "work", "tmp"))
    for directory in (home, work, scratch):
        directory.mkdir(exist_ok=True)
    layers = await asyncio.to_thread(harness.layers)
    files: Any = HostFiles(home)
    await harness.configure(files, endpoint)
    command: Command = harness.command(prompt, endpoint)

    def local(text: str) -> str:
        for layer in layers:
            text = text.replace(layer.mount_point, str(layer.source))
        return text.replace(HOME, str(home))

    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "TMPDIR": str(scratch),
        **{k: local(v) for k, v in command.env.items()},
    }
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(local(a) for a in command.argv), stdin=-1, stdout=-1, stderr=-1, env=env, cwd=work
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate(command.stdin)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        return ExecResult(None, out, err, timed_out=True, duration=time.monotonic() - began)
    return ExecResult(process.returncode, out, err, duration=time.monotonic() - began)
