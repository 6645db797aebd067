"""Tries the limits of a sandbox on another kernel, and prints what happened as a line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.local import LocalBackend

HOG = "x = bytearray()\nwhile True: x += bytes(4 << 20)"


def _settings() -> dict[str, str]:
    found = {}
    for path in Path("/sys/fs/cgroup").rglob("sandlot-run-*/*-*"):
        for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
            if (path / name).exists():
                found[name] = (path / name).read_text().strip()
    return found


def _left() -> list[str]:
    return [str(path) for path in Path("/sys/fs/cgroup").rglob("sandlot-run-*") if path.is_dir()]


async def main() -> dict[str, Any]:
    """One sandbox that meets each of its limits."""
    backend = LocalBackend()
    async with await backend.create(SandboxSpec(limits=Limits(memory=64 << 20, processes=40, cpu=0.5))) as box:
        hog = await box.exec(["python3", "-c", HOG], timeout=200)
        forks = await box.exec("for i in $(seq 100); do sleep 3 & done; wait", timeout=200)
        said = {
            "users": box.facts["users"],
            "limits": box.facts["limits"],
            "settings": await asyncio.to_thread(_settings),
            "hog": [hog.exit_code, hog.out_of_memory],
            "forks": forks.text(),
            "alive": (await box.exec("echo alive")).text(),
        }
    await backend.close()
    return {**said, "left": _left(), "files": sorted(os.listdir(backend.run_dir.parent))}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())), flush=True)
