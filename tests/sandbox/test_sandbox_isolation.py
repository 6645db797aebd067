"""What a program inside can see and reach: nothing of the machine, of Sandlot, or of another sandbox."""

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox import Layer, SandboxSpec
from sandlot.sandbox.jail import seccomp
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox
from support.backends import ON_THIS_MACHINE

BACKENDS = ON_THIS_MACHINE
pytestmark = pytest.mark.asyncio(loop_scope="module")

USERS = ["agent", "root"]


async def _python(sandbox: LocalSandbox, script: str, user: str) -> str:
    result = await sandbox.exec(["python3", "-c", textwrap.dedent(script)], user=user)
    assert result.ok, result.text()
    return result.stdout.decode()


@pytest.mark.parametrize("user", USERS)
async def test_nothing_of_the_machine_is_seen(shared: LocalSandbox, user: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("machine")
    home = Path.home()
    script = f"""
        ls -d {tmp_path} {home}/.cache /etc/shadow /etc/gitconfig /etc/pip.conf /boot 2>/dev/null
        cat /proc/*/environ /proc/*/cmdline /proc/self/mountinfo /proc/self/cgroup | tr '\\0' '\\n'
        ls /home
    """
    result = await shared.exec(["sh"], stdin=script.encode(), user=user)
    text = result.stdout.decode()
    assert str(tmp_path) not in text
    assert sys.prefix == "/usr" or sys.prefix not in text
    assert ".cache" not in text
    assert not {"/etc/shadow", "/etc/gitconfig", "/etc/pip.conf", "/boot"} & set(text.splitlines())
    for name in ("LS_COLORS", "PYTEST_CURRENT_TEST", "SSH_", "VIRTUAL_ENV"):
        assert name not in text
    assert text.splitlines()[-1] == "agent"


@pytest.mark.parametrize("user", USERS)
async def test_only_its_own_processes_are_seen(shared: LocalSandbox, user: str) -> None:
    count = int(await _python(shared, "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))", user))
    assert count <= 7  # itself, init, who watches it; at most two who wait for the next request, with a child each


@pytest.mark.parametrize("user", USERS)
async def test_pid_one_cannot_be_touched(shared: LocalSandbox, user: str) -> None:
    if user == "root" and shared.facts["backend"] != "local":
        pytest.skip("the root of a container may end it")
    script = """
        import ctypes, os
        for name in ("mem", "environ", "fd", "root", "cwd", "exe", "maps"):
            path = f"/proc/1/{name}"
            try:
                if name == "fd": os.listdir(path)
                elif name in ("root", "cwd", "exe"): os.readlink(path)
                else: open(path, "r+b" if name == "mem" else "rb").read(1)
                print("reached", name)
            except OSError: pass
        if ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) == 0: print("traced")
        for number in (9, 19, 15):
            try: os.kill(1, number)
            except PermissionError: pass
        print("sent")
    """
    assert await _python(shared, script, user) == "sent\n"
    assert (await shared.exec(["true"])).ok


async def test_killing_everything_inside_does_not_end_the_sandbox(sandbox: LocalSandbox) -> None:
    for user in USERS if sandbox.facts["backend"] == "local" else ["agent"]:  # the root of a container may end it
        result = await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9)"], user=user)
        assert result.exit_code in (0, None)
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


FORBIDDEN = """
    import ctypes, errno, os
    libc = ctypes.CDLL(None, use_errno=True)
    def call(name, *args):
        ctypes.set_errno(0)
        result = libc.syscall(NUMBERS[name], *args)
        if result >= 0: print("allowed", name)
        elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): print(name, os.strerror(ctypes.get_errno()))
    call("unshare", 0x10000000); call("unshare", 0x20000)
    call("mount", b"t", b"/tmp", b"tmpfs", 0, 0); call("setns", 0, 0); call("umount2", b"/proc", 2)
    call("keyctl", 0, -3, 1); call("add_key", b"user", b"a", b"b", 1, -3); call("bpf", 0, 0, 0)
    call("perf_event_open", 0, 0, -1, -1, 0); call("userfaultfd", 0); call("init_module", 0, 0, b"")
    call("io_uring_setup", 1, 0); call("open_by_handle_at", -1, 0, 0); call("fsopen", b"tmpfs", 0)
    call("chroot", b"/tmp"); call("reboot", 0, 0, 0, 0); call("pivot_root", b".", b"."); call("kexec_load", 0, 0, 0, 0)
"""


@pytest.mark.parametrize("user", USERS)
async def test_dangerous_calls_are_refused(shared: LocalSandbox, user: str) -> None:
    numbers = {name: row[0 if os.uname().machine == "x86_64" else 1] for name, row in seccomp._DENIED.items()}
    assert await _python(shared, f"NUMBERS = {numbers}\n" + textwrap.dedent(FORBIDDEN), user) == ""


@pytest.mark.parametrize("user", USERS)
async def test_devices_and_kernel_settings_are_out_of_reach(shared: LocalSandbox, user: str) -> None:
    script = """
        import os, socket, stat
        try: os.mknod("/tmp/sda", 0o600 | stat.S_IFBLK, os.makedev(8, 0)); print("mknod")
        except OSError: pass
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname", "/usr/x"):
            try: open(path, "w").write("x"); print("wrote", path)
            except OSError: pass
        for family in (40, 38, 17, 31):
            try: socket.socket(family, socket.SOCK_SEQPACKET if family == 38 else socket.SOCK_DGRAM); print(family)
            except OSError: pass
        print(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3], sorted(os.listdir("/dev")))
    """
    devices = [
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    ]
    said = await _python(shared, script, user)
    assert said.replace("'mqueue', ", "") == f"[0, 1, 2] {devices}\n"


@pytest.mark.parametrize("user", USERS)
async def test_rights_are_dropped(shared: LocalSandbox, user: str) -> None:
    text = await _python(shared, "print(open('/proc/self/status').read())", user)
    status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert int(status["CapAmb"], 16) == int(status["CapInh"], 16) == 0
    allowed = 0x800004FB if user == "root" and shared.facts["users"] == "range" else 0
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == allowed
    if shared.facts["backend"] == "local":
        assert int(status["CapBnd"], 16) == allowed
    opened = await _python(shared, "import os; print(os.listdir('/proc/self/fd'))", user)
    assert len(opened.split(",")) == 4


async def test_the_root_of_a_sandbox_is_not_the_machines(sandbox: LocalSandbox) -> None:
    if sandbox.facts["backend"] != "local":
        pytest.skip("a container's root is the machine's, with fewer rights")
    process = await sandbox.spawn("exec sleep 81.25", user="root")
    for _ in range(100):
        found = await asyncio.to_thread(subprocess.check_output, ["ps", "axo", "uid,args"], text=True)
        uids = [int(line.split()[0]) for line in found.splitlines() if line.endswith(" sleep 81.25")]
        if uids:
            break
        await asyncio.sleep(0.02)
    await process.kill()
    assert len(uids) == 1
    assert uids[0] != 0


async def test_two_sandboxes_do_not_meet(backend: LocalBackend, shared: LocalSandbox) -> None:
    async with await backend.create(SandboxSpec()) as other:
        server = "import socket, time; s = socket.socket(1); s.bind(chr(0) + 'meet'); s.listen(); time.sleep(60)"
        process = await shared.spawn(["python3", "-c", server])
        await shared.write_file("/usr-shared-name", b"mine", user="root")
        client = "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'meet')"
        for _ in range(100):
            if (await shared.exec(["python3", "-c", client])).ok:
                break
        assert (await shared.exec(["python3", "-c", client])).ok
        assert b"refused" in (await other.exec(["python3", "-c", client])).stderr
        assert b"time.sleep" not in (await other.exec("ps axww")).stdout
        with pytest.raises(FileNotFoundError):
            await other.read_file("/usr-shared-name")
        await process.kill()


def _tool(layer: Path) -> Path:
    tool = layer / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho from the layer\n")
    tool.chmod(0o755)
    layer.chmod(0o755)
    return tool


async def test_layers_are_shared_and_read_only(backend: LocalBackend, tmp_path: Path) -> None:
    tool = _tool(tmp_path)
    layer = Layer(tmp_path, "/opt/agents/tool")
    async with await backend.create(SandboxSpec(layers=(layer,))) as sandbox:
        assert (await sandbox.exec(["/opt/agents/tool/bin/tool"])).stdout == b"from the layer\n"
        for user in USERS:
            assert not (await sandbox.exec("echo x > /opt/agents/tool/bin/tool", user=user)).ok
            assert not (await sandbox.exec("rm -rf /opt/agents/tool/bin", user=user)).ok
    assert tool.read_text().endswith("layer\n")


def _image(root: Path) -> Path:
    """A root file system whose links try to lead mounts and account files out of it."""
    for name in ("etc", "opt"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n")
    (root / "opt" / "data").write_text("from the image")
    (root / "work").symlink_to("/real-work")
    (root / "escape").symlink_to(root.parent / "outside")
    (root / "etc" / "group").symlink_to(root.parent / "outside-group")
    for path in (root.parent, root):
        path.chmod(0o755)
    return root


async def test_an_image_directory_is_copied_on_write(backend: LocalBackend, tmp_path: Path) -> None:
    if backend.name != "local":
        pytest.skip("images are the daemon's")
    image = _image(tmp_path / "image")
    layers = (Layer(Path("/usr"), "/usr"), Layer(tmp_path, "/escape/in"))
    async with await backend.create(SandboxSpec(image=str(image), layers=layers, workdir="/work/here")) as sandbox:
        result = await sandbox.exec("whoami; pwd -P; cat /opt/data; touch made; id -gn")
        assert result.stdout == b"agent\n/real-work/here\nfrom the imageagent\n"
        changed = await sandbox.exec("rm -f /opt/data && echo x > /etc/new && cat /etc/new", user="root")
        assert changed.stdout == b"x\n", changed.text()
    assert (image / "opt" / "data").read_text() == "from the image"
    assert sorted(os.listdir(image / "etc")) == ["group", "passwd"]
    assert os.listdir(tmp_path) == ["image"]


async def test_what_cannot_be_done_is_refused_at_create(backend: LocalBackend) -> None:
    for spec in (
        SandboxSpec(image="/does/not/exist"),
        SandboxSpec(image="not a name"),
        SandboxSpec(layers=(Layer(Path("/does/not/exist"), "/opt/x"),)),
        SandboxSpec(layers=(Layer(Path("/usr"), "relative"),)),
        SandboxSpec(workdir="relative"),
    ):
        with pytest.raises(SandboxUnavailableError):
            await backend.create(spec)


async def test_the_listener_is_the_only_way_out(shared: LocalSandbox) -> None:
    listener = shared.listen(8123)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"gateway says " + await reader.readline())
        await writer.drain()
        writer.close()

    outside = socket.socket()
    outside.bind(("127.0.0.1", 0))
    outside.listen()
    probe = """
        import socket, sys
        s = socket.create_connection(("127.0.0.1", 8123), 5); s.sendall(b"hello\\n"); print(s.makefile().read(), end="")
        for address in (("127.0.0.1", PORT), ("169.254.169.254", 80), ("10.0.0.1", 80), ("1.1.1.1", 53), ("::1", 8123)):
            try:
                socket.create_connection(address, 2); print("reached", address)
            except OSError: pass
        for address in (("1.1.1.1", 53), ("169.254.169.254", 53)):
            try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", address); print("sent", address)
            except OSError: pass
        try: socket.getaddrinfo("example.com", 80); print("resolved")
        except OSError: pass
    """
    async with await asyncio.start_server(answer, sock=listener):
        script = probe.replace("PORT", str(outside.getsockname()[1]))
        assert await _python(shared, script, "agent") == "gateway says hello\n"
        with pytest.raises(SandboxError, match="8123"):
            shared.listen(8123)
    outside.close()
    again = shared.listen(8123)
    again.close()


async def test_no_listener_without_the_gateway(sandbox: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match="network"):
        sandbox.listen(8123)


async def test_a_listener_belongs_to_one_sandbox(backend: LocalBackend) -> None:
    seen: list[str] = []

    async def serve(name: str, sandbox: LocalSandbox) -> asyncio.Server:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(name)
            writer.close()

        return await asyncio.start_server(answer, sock=sandbox.listen(9000))

    spec = SandboxSpec(network="gateway")
    async with await backend.create(spec) as first, await backend.create(spec) as second:
        servers = [await serve("first", first), await serve("second", second)]
        for sandbox in (first, second, first):
            assert (await sandbox.exec(["bash", "-c", "cat < /dev/tcp/127.0.0.1/9000"])).ok
        for server in servers:
            server.close()
    assert seen == ["first", "second", "first"]
