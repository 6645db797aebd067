"""A background command outlives every deadline of the calls beside it; a deadline ends its own command and all of it.

Time is scaled: each bound of the local backend is a two-hundredth of its own, so that two seconds stand for minutes.
"""

import asyncio

import pytest

from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend, process, sandbox
from sandlot.sandbox.local.sandbox import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCALE = 200
TICKS = 40
COUNT = f"for i in $(seq {TICKS}); do echo $i; echo $i > tick; sleep 0.05; done; echo done >&2; exit 7"


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of a file call's silence, and of the wait for whoever holds the output of a dead command."""
    for module, name in ((sandbox, "_FILE_SECONDS"), (process, "_LEFTOVER_SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name) / SCALE)


async def _go_on(box: LocalSandbox, rounds: int) -> None:
    """What an agent does meanwhile, with commands that end by themselves, by a deadline, and by a kill."""
    for number in range(rounds):
        assert (await box.exec(f"echo {number}", timeout=60)).stdout == b"%d\n" % number
        assert (await box.exec("sleep 81.5 & sleep 81.5", timeout=0.05)).timed_out
        other = await box.spawn("sleep 81.5")
        await other.kill()
        await box.write_file("/workspace/note", b"%d" % number)


@pytest.mark.usefixtures("scaled")
async def test_a_spawned_command_runs_on_while_the_agent_goes_on(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        background = await box.spawn(COUNT)
        await _go_on(box, 5)
        assert background.running
        result = await background.wait()
        assert (result.exit_code, result.stderr, result.timed_out) == (7, b"done\n", False)
        assert result.stdout.split() == [b"%d" % n for n in range(1, TICKS + 1)]
        assert await background.wait(0.001) == result


@pytest.mark.usefixtures("scaled")
async def test_a_daemon_of_an_agents_command_runs_on(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        started = await box.exec(f"nohup sh -c '{COUNT}' > log 2>&1 & echo started", timeout=30)
        assert started.stdout == b"started\n"
        await _go_on(box, 5)
        waited = await box.exec("while ! grep -q done log; do sleep 0.05; done; head -n -1 log | wc -l", timeout=120)
        assert int(waited.stdout) == TICKS


async def test_nothing_moves_after_a_deadline(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        late = await box.exec("while true; do date +%N >> grows; sleep 0.01; done", timeout=0.5)
        assert late.timed_out
        first = await box.read_file("/workspace/grows")
        await asyncio.sleep(0.2)
        assert await box.read_file("/workspace/grows") == first


async def test_a_result_is_there_for_whoever_asks_late_or_twice(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        done = await box.spawn("echo kept; exit 3")
        asking = asyncio.ensure_future(done.wait(60))
        await asyncio.sleep(0)
        asking.cancel()  # a dropped caller is no reason to drop the command
        await box.exec("sleep 0.3")
        result = await done.wait(60)
        assert (result.exit_code, result.stdout) == (3, b"kept\n")
