"""Many sandboxes, one after the other and at once, leave a machine as it was."""

import asyncio
import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LANES, BOOTS = 4, 1000


@dataclass(frozen=True)
class Held:
    """What this process and its zygote hold, and what lies around for them."""

    descriptors: tuple[int, int]
    mounts: int
    files: int
    groups: int
    keepers: int


def _held(backend: LocalBackend) -> Held:
    assert backend._zygote is not None
    assert backend._machine is not None
    gc.collect()
    ours, zygote = os.getpid(), backend._zygote.pid
    descriptors = (len(os.listdir(f"/proc/{ours}/fd")), len(os.listdir(f"/proc/{zygote}/fd")))
    lines = Path(f"/proc/{zygote}/mountinfo").read_text().splitlines()  # others mount as well
    mounts = sum(str(backend.run_dir) in line for line in lines)
    groups = sum(len(list(parent.glob("*-*"))) for parent in backend._machine.tier.parents.values())
    files = sum(1 for path in backend.run_dir.rglob("*") if backend.run_dir / "spares" not in path.parents)
    keepers = len(Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split())
    return Held(descriptors, mounts, files, groups, keepers)


async def _at_rest(backend: LocalBackend) -> Held:
    """What is held when keepers have ended and the spare one is made."""
    for _ in range(600):
        held = await asyncio.to_thread(_held, backend)
        if held.keepers == 1 and held.groups == 0 and any((backend.run_dir / "spares").glob("*/work/work")):
            return held
        await asyncio.sleep(0.05)
    pytest.fail(f"it did not come to rest: {held}")


def _memory(backend: LocalBackend) -> int:
    """KiB that the zygote alone holds."""
    assert backend._zygote is not None
    status = Path(f"/proc/{backend._zygote.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("RssAnon:")))


async def test_a_thousand_boots_leave_everything_flat(backend: LocalBackend) -> None:
    async def lane(boots: int) -> None:
        for number in range(boots):
            async with await backend.create(SandboxSpec()) as sandbox:
                if number % 10 == 0:
                    assert (await sandbox.exec("echo x > x; sleep 100 & true")).ok

    async def boot(count: int) -> None:
        await asyncio.gather(*(lane(count // LANES) for _ in range(LANES)))

    await boot(8 * LANES)
    before, memory = await _at_rest(backend), _memory(backend)
    await boot(BOOTS)
    assert await _at_rest(backend) == before
    assert _memory(backend) < memory + 1024


async def test_two_hundred_fifty_six_at_once(backend: LocalBackend) -> None:
    await (await backend.create(SandboxSpec())).kill()
    before = await _at_rest(backend)
    made: list[LocalSandbox] = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(256)))
    results = await asyncio.gather(*(s.exec(["sh", "-c", f"echo {n} > n; cat n"]) for n, s in enumerate(made)))
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(256)]
    assert len({sandbox.id for sandbox in made}) == 256
    await asyncio.gather(*(sandbox.kill() for sandbox in made))
    del made, results
    assert await _at_rest(backend) == before
