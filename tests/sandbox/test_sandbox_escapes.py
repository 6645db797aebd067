"""What a hostile program may try against the processes of ours beside it, and against the walls."""

import asyncio
import os
import textwrap
from pathlib import Path

import pytest

from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend, process
from sandlot.sandbox.local.sandbox import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
USERS = ["agent", "root"]

ATTACK = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    ours = {os.getpid(), os.getppid()} if os.getppid() != 1 else {os.getpid()}
    others = [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) != os.getpid()]
    print(len(others))
    for pid in others:
        for name in ("mem", "environ", "maps", "auxv", "syscall", "stack", "personality", "io", "pagemap"):
            try:
                if open(f"/proc/{pid}/{name}", "rb").read(1): print("read", pid, name)
            except OSError: pass
        for name in ("fd", "fdinfo", "map_files", "task/%d/fd" % pid):
            try: print("listed", pid, name, os.listdir(f"/proc/{pid}/{name}"))
            except OSError: pass
        for name in ("root", "cwd", "exe", "ns/mnt", "ns/net", "ns/user"):
            try: print("followed", pid, name, os.readlink(f"/proc/{pid}/{name}"))
            except OSError: pass
        for name in ("oom_score_adj", "coredump_filter", "timerslack_ns", "mem", "uid_map", "setgroups"):
            try: os.write(os.open(f"/proc/{pid}/{name}", os.O_WRONLY), b"0"); print("wrote", pid, name)
            except OSError: pass
        for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
            if libc.ptrace(request, pid, 0, 0) == 0: print("traced", pid)
        buffer, other = ctypes.create_string_buffer(8), ctypes.c_size_t(8)
        class IO(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        here, there = IO(ctypes.addressof(buffer), 8), IO(0x400000, 8)
        if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0: print("copied", pid)
        handle = libc.syscall(434, pid, 0)  # pidfd_open
        if handle >= 0:
            for fd in range(12):
                if libc.syscall(438, handle, fd, 0) >= 0: print("took fd", fd, "of", pid)
"""


async def _python(box: LocalSandbox, script: str, user: str, **options: float) -> str:
    result = await box.exec(["python3", "-c", textwrap.dedent(script)], user=user, **options)  # type: ignore[arg-type]
    assert result.ok, result.text()
    return result.stdout.decode()


@pytest.mark.parametrize("user", USERS)
async def test_no_process_of_ours_can_be_looked_into(backend: LocalBackend, user: str) -> None:
    """Init, whoever watches a command, and whoever waits for the next: they hold rights, and what Sandlot sent."""
    async with await backend.create(SandboxSpec(network="gateway")) as box:
        assert (await box.exec(["true"])).ok  # a worker that has worked waits beside a fresh one
        listener = box.listen(8123)
        lines = (await _python(box, ATTACK, user)).splitlines()
        listener.close()
        assert int(lines[0]) >= 3
        assert lines[1:] == []


async def test_the_agent_can_signal_nobody_of_ours(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        if box.facts["users"] == "single":
            pytest.skip("one id: root and agent are the same user")
        script = """
            import os
            for pid in [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) != os.getpid()]:
                for number in (0, 9, 19, 10, 17):
                    try: os.kill(pid, number); print("sent", number, "to", pid)
                    except (PermissionError, ProcessLookupError): pass
        """
        assert await _python(box, script, "agent") == ""


@pytest.mark.parametrize("number", [9, 10, 15, 19, 17, 12])
async def test_signals_to_everybody_do_not_stop_the_next_command(
    backend: LocalBackend, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root inside may signal what waits for the next request: another one takes its place."""
    monkeypatch.setattr(process, "_KILL_SECONDS", 0.5)
    async with await backend.create(SandboxSpec()) as box:
        for _ in range(2):
            await box.exec(["python3", "-c", f"import os; os.kill(-1, {number})"], user="root", timeout=1)
            async with asyncio.timeout(60):
                assert (await box.exec("echo next")).stdout == b"next\n"
                await box.write_file("/workspace/f", b"x")
                assert await box.read_file("/workspace/f") == b"x"


@pytest.mark.parametrize("user", USERS)
async def test_a_command_has_three_descriptors_and_one_parent_of_ours(backend: LocalBackend, user: str) -> None:
    async with await backend.create(SandboxSpec()) as box:
        for _ in range(3):  # a first, a repeated and a parallel one
            both = await asyncio.gather(
                *(box.exec("ls -l /proc/self/fd; cat /proc/self/limits", user=user) for _ in "ab")
            )
            for result in both:
                text = result.stdout.decode()
                assert text.count(" -> pipe:") == 2
                assert " -> /dev/null" in text
                assert "socket:" not in text
                assert "memfd" not in text
                assert "cgroup" not in text


async def test_no_new_namespace_by_any_call(backend: LocalBackend) -> None:
    script = """
        import ctypes, errno, struct, threading
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x00000080):
            arguments = ctypes.create_string_buffer(struct.pack("QQQQQQQQ", flags, 0, 0, 0, 17, 0, 0, 0), 64)
            if libc.syscall(435, arguments, 64) != -1 or ctypes.get_errno() != errno.ENOSYS: print("clone3", hex(flags))
            if libc.unshare(flags) == 0: print("unshare", hex(flags))
        thread = threading.Thread(target=lambda: print("a thread runs")); thread.start(); thread.join()
    """
    async with await backend.create(SandboxSpec()) as box:
        for user in USERS:
            assert await _python(box, script, user) == "a thread runs\n"
        assert (await box.exec("unshare -U true || unshare -r true || unshare -n true")).exit_code != 0


async def test_nothing_of_the_machine_stays_mounted(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec()) as box:
        mounts = [
            line.split() for line in (await box.exec(["cat", "/proc/self/mountinfo"])).stdout.decode().splitlines()
        ]
        points = {fields[4] for fields in mounts}
        assert points <= {
            *("/", "/proc", "/dev", "/dev/pts", "/dev/shm", "/usr", "/etc/alternatives", "/etc/ssl/certs"),
            *(f"/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")),
            *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
            *(f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus", "kcore", "keys", "timer_list")),
            *(f"/proc/{name}" for name in ("latency_stats", "sched_debug", "kmsg")),
        }
        writable = {fields[4] for fields in mounts if "rw" in fields[5].split(",")}
        assert not writable & {"/usr", "/etc/alternatives", "/etc/ssl/certs", "/proc/sys", "/proc/irq", "/proc/bus"}
        assert (await box.exec("ls -d /dev/root /dev/dev /dev/proc /root/.. /..", user="root")).stdout.split() == [
            b"/..",
            b"/root/..",
        ]
        listed = (await box.exec("ls /..", user="root")).stdout
        assert listed == (await box.exec("ls /", user="root")).stdout


def _family(pid: int) -> dict[int, tuple[set[str], bytes]]:
    """Open files and environment of a process and all below it."""
    found, pending = {}, [pid]
    while pending:
        pid = pending.pop()
        proc = Path(f"/proc/{pid}")
        try:
            found[pid] = {os.readlink(fd) for fd in (proc / "fd").iterdir()}, (proc / "environ").read_bytes()
            pending += [int(child) for child in (proc / f"task/{pid}/children").read_text().split()]
        except OSError:
            found.pop(pid, None)  # it ended
    return found


async def test_whoever_will_be_a_sandbox_holds_nothing_of_this_process(backend: LocalBackend, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with await backend.create(SandboxSpec()) as box:
            await box.exec(["true"])
            assert backend._zygote is not None
            family = await asyncio.to_thread(_family, backend._zygote.pid)
    assert len(family) >= 2  # a plain user cannot look into those that hold rights
    for files, environment in family.values():
        assert not [name for name in files if str(tmp_path) in name]
        assert environment.strip(b"\0") == b""


async def test_a_child_killed_while_it_waits_for_a_command_is_replaced(backend: LocalBackend) -> None:
    """Root inside kills the youngest process that is not its own: the one that would run the next command."""
    script = """
        import os, time
        waiting = [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) not in (1, os.getpid(), os.getppid())]
        for pid in sorted(waiting, reverse=True)[:COUNT]: os.kill(pid, 9)
    """
    async with await backend.create(SandboxSpec()) as box:
        for count in (1, 2, 3):
            await asyncio.gather(*(box.exec(["true"]) for _ in range(3)))
            await _python(box, script.replace("COUNT", str(count)), "root")
            results = [await box.exec(f"echo {n}") for n in range(3)]
            assert [result.stdout for result in results] == [b"0\n", b"1\n", b"2\n"]
