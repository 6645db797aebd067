"""An end leaves nothing: no process, mount, limit group, file or descriptor, whoever dies and however."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sandlot.errors import SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend, state
from support import end_run

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _groups() -> set[str]:
    found = subprocess.run(["find", "/sys/fs/cgroup", "-name", "*-*", "-path", "*sandlot-run-*"], capture_output=True)
    return set(found.stdout.decode().split())


def _marked(marker: str) -> list[str]:
    listing = subprocess.check_output(["ps", "axww", "-o", "stat,args"], text=True)
    return [line for line in listing.splitlines() if marker in line and not line.startswith("Z")]


def _found(directory: Path, pattern: str) -> list[Path]:
    return list(directory.glob(pattern))


async def _gone(marker: str) -> bool:
    for _ in range(200):
        if not await asyncio.to_thread(_marked, marker):
            return True
        await asyncio.sleep(0.02)
    return False


HARD_TO_KILL = (
    "(setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 91.5; done' &); "
    "sleep 91.5 & kill -STOP $!; python3 -c 'import os, time\nos.fork() or (os.setsid(), os.fork(), time.sleep(91.5))'"
)


async def test_kill_processes_kills_all_and_the_sandbox_works_on(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as sandbox:
        await sandbox.exec("echo kept > kept")
        processes = [await sandbox.spawn(HARD_TO_KILL, user=user) for user in ("agent", "root")]
        await asyncio.sleep(0.4)
        running = asyncio.ensure_future(sandbox.exec("sleep 91.5", timeout=None))
        await asyncio.sleep(0.1)
        await sandbox.kill_processes()
        assert (await running).exit_code is None
        for process in processes:
            await process.wait(5)
            assert not process.running
        assert b"91.5" not in (await sandbox.exec("ps axww | grep -v grep")).stdout
        assert (await sandbox.exec(["cat", "kept"])).stdout == b"kept\n"
        await sandbox.kill_processes()


async def test_kill_leaves_nothing(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    directory = backend.run_dir / sandbox.id
    await sandbox.exec(
        "mkdir -p a/b && chmod 000 a && touch 'x\ty'; mkdir $(python3 -c 'print(\"d/\" * 1500)') -p; sleep 192.5 &"
    )
    await sandbox.spawn(HARD_TO_KILL.replace("91.5", "192.5"))
    call = asyncio.ensure_future(sandbox.exec("sleep 192.5", timeout=None))
    await asyncio.sleep(0.2)
    assert directory.is_dir()
    await asyncio.gather(sandbox.kill(), sandbox.kill())
    with pytest.raises(SandboxLostError):
        await call
    assert not directory.exists()
    assert await _gone("192.5")
    assert not [path for path in await asyncio.to_thread(_groups) if sandbox.id in path]
    assert str(directory) not in await asyncio.to_thread(Path("/proc/self/mountinfo").read_text)
    with pytest.raises(SandboxLostError):
        await sandbox.exec(["true"])
    await sandbox.kill()


async def test_a_deep_tree_is_removed(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    script = "import os\nfor i in range(1000):\n os.mkdir('deep'); os.chdir('deep')\nopen('f', 'w')"
    assert (await sandbox.exec(["python3", "-c", script])).ok
    await sandbox.kill()
    assert not (backend.run_dir / sandbox.id).exists()


async def test_a_cancelled_create_leaves_nothing(backend: LocalBackend) -> None:
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        task = asyncio.ensure_future(backend.create(SandboxSpec()))
        await asyncio.sleep(delay)
        task.cancel()
        try:
            await (await task).kill()
        except asyncio.CancelledError:
            pass
    for _ in range(200):
        if not [name for name in os.listdir(backend.run_dir) if "-" in name]:
            break
        await asyncio.sleep(0.02)
    assert not [name for name in os.listdir(backend.run_dir) if "-" in name]


OWNER = """
import asyncio, os, sys
from pathlib import Path
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend

async def main():
    backend = LocalBackend(Path(sys.argv[1]))
    made = [await backend.create(SandboxSpec()) for _ in range(3)]
    for sandbox in made:
        await sandbox.spawn("touch up; setsid sleep 193.5 & sleep 193.5")
        while not (await sandbox.exec("ls up")).ok: pass
    print(backend._zygote.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("victims", ["owner", "owner and zygote", "zygote then owner"])
async def test_a_killed_owner_leaves_nothing(tmp_path: Path, victims: str) -> None:
    source = str(Path(state.__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, sys.path)])}
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path), env=environment, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    zygote = int(await owner.stdout.readline())
    assert len(await asyncio.to_thread(_marked, "193.5")) >= 3
    order = {"owner": [owner.pid], "owner and zygote": [owner.pid, zygote], "zygote then owner": [zygote, owner.pid]}
    for pid in order[victims]:
        os.kill(pid, signal.SIGKILL)
    await owner.wait()
    assert await _gone("193.5")
    wanted = "run-*" if victims == "owner" else "run-*/*-*"  # the zygote, where it lives on, ends the run as well
    for _ in range(250):
        if not _found(tmp_path, wanted):
            break
        await asyncio.sleep(0.02)
    assert not _found(tmp_path, wanted)
    await LocalBackend(tmp_path).sweep()
    assert os.listdir(tmp_path) == [".lock"]
    assert not [path for path in await asyncio.to_thread(_groups) if f"run-{owner.pid}-" in path]


@pytest.mark.slow
async def test_a_kill_at_any_moment_leaves_only_what_the_next_start_sweeps(tmp_path: Path) -> None:
    """Owners boot, freeze and kill without end, and die one after the other; a run beside them must not notice."""
    source = str(Path(state.__file__).parents[3])
    paths = [source, str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    living = LocalBackend(tmp_path)
    async with await living.create(SandboxSpec()) as beside:
        await beside.exec("echo mine > mine")
        busy = await asyncio.create_subprocess_exec(
            sys.executable, end_run.__file__, str(tmp_path), env=environment, stdout=subprocess.PIPE
        )
        assert busy.stdout is not None
        owners = [int(await busy.stdout.readline()) for _ in range(end_run.OWNERS)]
        for _ in range(2000):
            if len(_found(tmp_path, "run-*/*/about.json")) > len(owners):
                break
            await asyncio.sleep(0.02)
        for number, owner in enumerate(owners):
            await asyncio.sleep(0.013 * number)
            for zygote in _children(owner) if number % 2 else []:
                os.kill(zygote, signal.SIGKILL)
            os.kill(owner, signal.SIGKILL)
        await busy.wait()
        assert await _gone("194.5")
        for _ in range(500):  # the last keepers and zygotes let go of their runs
            await living.sweep()
            if len(_found(tmp_path, "run-*")) == 1:
                break
            await asyncio.sleep(0.02)
        assert _found(tmp_path, "run-*") == [living.run_dir]
        groups = await asyncio.to_thread(_groups)
        assert not [path for path in groups if any(f"run-{owner}-" in path for owner in owners)]
        assert await beside.read_file("mine") == b"mine\n"
    await living.close()
    assert os.listdir(tmp_path) == [".lock"]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_sweep_removes_dead_runs_only(backend: LocalBackend, tmp_path: Path) -> None:
    live = LocalBackend(tmp_path)
    async with await live.create(SandboxSpec()) as sandbox:
        dead = tmp_path / f"run-{os.getpid()}-1-abc"
        (dead / "7-beef" / "upper" / "dir").mkdir(parents=True)
        (dead / ".lock").touch()
        (tmp_path / "unrelated").mkdir()
        other = LocalBackend(tmp_path)
        assert await other.sweep() == 1
        assert not dead.exists()
        assert (tmp_path / "unrelated").is_dir()
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    await live.close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "unrelated"]


async def test_a_killed_zygote_is_replaced(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    async with await backend.create(SandboxSpec()) as first:
        assert backend._zygote is not None
        os.kill(backend._zygote.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, backend._zygote.pid, os.WEXITED | os.WNOWAIT)
        assert (await first.exec("echo alive")).stdout == b"alive\n"
        async with await backend.create(SandboxSpec()) as second:
            assert (await second.exec("echo too")).stdout == b"too\n"
    await backend.close()
    assert os.listdir(tmp_path) == [".lock"]


async def test_sixteen_at_once(backend: LocalBackend) -> None:
    made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(16)))
    results = await asyncio.gather(*(s.exec(["sh", "-c", f"echo {n} > n; cat n"]) for n, s in enumerate(made)))
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(16)]
    await asyncio.gather(*(sandbox.kill() for sandbox in made))
    assert not [path for path in await asyncio.to_thread(_groups) if any(s.id in path for s in made)]
    assert not [sandbox.id for sandbox in made if (backend.run_dir / sandbox.id).exists()]


async def test_a_machine_that_forbids_namespaces_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(tmp_path)
    monkeypatch.setattr(LocalBackend, "trial", lambda self, what, **_: "[Errno 1] unshare: Operation not permitted")
    with pytest.raises(SandboxUnavailableError, match=r"need user namespaces.*; .+"):
        await backend.create(SandboxSpec())
    assert os.listdir(tmp_path) == [".lock"]
