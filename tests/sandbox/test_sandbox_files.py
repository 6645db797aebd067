"""Files in and out: whatever a hostile program puts in the way, nothing outside is read or written, nothing hangs."""

import asyncio
import io
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandlot.errors import SandboxError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox
from support.backends import EVERYWHERE

BACKENDS = EVERYWHERE
on_module_loop = pytest.mark.asyncio(loop_scope="module")


async def _download(sandbox: LocalSandbox, path: str, **options: object) -> dict[str, tarfile.TarInfo]:
    data = b"".join([chunk async for chunk in sandbox.download_tar(path, **options)])  # type: ignore[arg-type]
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        members = archive.getmembers()
        for member in members:
            content = archive.extractfile(member) if member.isreg() else None
            member.pax_headers["content"] = content.read().decode("latin-1") if content else ""
    return {member.name: member for member in members}


def _tar(*members: tuple[str, bytes | str | dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                archive.addfile(info, io.BytesIO(what))
                continue
            for key, value in (what if isinstance(what, dict) else {"type": tarfile.SYMTYPE, "linkname": what}).items():
                setattr(info, key, value)
            archive.addfile(info)
    return buffer.getvalue()


@on_module_loop
async def test_write_and_read(shared: LocalSandbox) -> None:
    data = os.urandom(3_000_000)
    await shared.write_file("/workspace/deep/er/file.bin", data, mode=0o750)
    assert await shared.read_file("/workspace/deep/er/file.bin") == data
    assert await shared.read_file("deep/er/file.bin") == data
    stat = await shared.exec(["stat", "-c", "%a %U", "/workspace/deep/er/file.bin", "/workspace/deep"])
    assert stat.stdout == b"750 agent\n755 agent\n"
    await shared.write_file("/workspace/deep/er/file.bin", b"short")
    assert await shared.read_file("/workspace/deep/er/file.bin") == b"short"
    await shared.write_file("/workspace/empty", b"")
    assert await shared.read_file("/workspace/empty") == b""


@on_module_loop
async def test_what_is_not_there(shared: LocalSandbox) -> None:
    for path in ("/workspace/none", "/none/none", "/etc/passwd/none"):
        with pytest.raises(FileNotFoundError):
            await shared.read_file(path)


@on_module_loop
async def test_the_user_counts(shared: LocalSandbox) -> None:
    if shared.facts["users"] == "single":
        pytest.skip("one id: root and agent are the same user")
    await shared.write_file("/root/secret", b"s", mode=0o600, user="root")
    with pytest.raises(SandboxError, match="denied"):
        await shared.write_file("/root/mine", b"x")
    with pytest.raises(SandboxError, match="denied"):
        await shared.upload_tar("/root/tree", _tar(("a", b"x")))
    await shared.exec("ln -s /root/secret /tmp/link-to-secret")
    with pytest.raises(SandboxError, match="denied"):
        await shared.write_file("/tmp/link-to-secret", b"x")
    assert await shared.read_file("/root/secret") == b"s"


@on_module_loop
async def test_links_stay_inside(shared: LocalSandbox) -> None:
    await shared.exec("ln -s /etc/hostname h; ln -s /etc/shadow s; mkdir -p d; ln -s / d/up; ln -s loop loop")
    assert (await shared.read_file("/workspace/h")).strip() == b"sandlot"
    with pytest.raises(FileNotFoundError):
        await shared.read_file("/workspace/s")
    assert (await shared.read_file("/workspace/d/up/etc/hostname")).strip() == b"sandlot"
    with pytest.raises(SandboxError):
        await shared.read_file("/workspace/loop")
    await shared.exec("ln -s /tmp/target into; rm -f /tmp/target")
    await shared.write_file("/workspace/into", b"inside")
    assert (await shared.exec("cat /tmp/target")).stdout == b"inside"


@on_module_loop
async def test_only_regular_files(shared: LocalSandbox) -> None:
    await shared.exec(
        "mkfifo fifo; mkdir -p dir; ln -s /proc/self/mem mem; ln -s /proc/1/environ env; ln -s /dev/zero zero; "
        "ln -s /proc/self/fd/0 fd; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"
    )
    for name in (
        "fifo",
        "dir",
        "mem",
        "env",
        "zero",
        "fd",
        "sock",
        "/proc/cpuinfo",
        "/proc/self/environ",
        "/proc/1/mem",
    ):
        async with asyncio.timeout(5):
            with pytest.raises((SandboxError, FileNotFoundError)):
                await shared.read_file(os.path.join("/workspace", name))
            with pytest.raises((SandboxError, FileNotFoundError)):
                await shared.write_file(os.path.join("/workspace", name), b"x")


@on_module_loop
async def test_sizes_are_counted_not_believed(shared: LocalSandbox) -> None:
    await shared.exec("truncate -s 7G sparse; head -c 1000 /dev/zero > thousand")
    with pytest.raises(SandboxError, match="larger than"):
        await shared.read_file("/workspace/sparse")
    assert len(await shared.read_file("/workspace/thousand", max_bytes=1000)) == 1000
    with pytest.raises(SandboxError, match="larger than 999"):
        await shared.read_file("/workspace/thousand", max_bytes=999)
    with pytest.raises(SandboxError, match="larger than"):
        async for _ in shared.download_tar("/workspace", max_bytes=1 << 20):
            pass


@on_module_loop
async def test_a_link_swapped_while_it_is_read(shared: LocalSandbox) -> None:
    swap = (
        "while :; do ln -sfn /etc/hostname swap; rm -rf swap; echo plain > swap; rm swap; mkdir swap; rmdir swap; done"
    )
    process = await shared.spawn(swap)
    for _ in range(60 if shared.facts["backend"] == "local" else 5):
        try:
            assert await shared.read_file("/workspace/swap") in (b"sandlot\n", b"sandlot", b"plain\n", b"")
        except (FileNotFoundError, SandboxError):
            pass
        members = await _download(shared, "/workspace", exclude_names=["sparse", "thousand"])
        if "swap" in members and members["swap"].isreg():
            assert members["swap"].pax_headers["content"] in ("plain\n", "")
    await process.kill()


@on_module_loop
async def test_download_keeps_what_matters(sandbox: LocalSandbox) -> None:
    script = r"""
        mkdir -p tree/sub/.git tree/empty && cd tree && echo a > a && chmod 751 a && ln -s ../../x sub/link
        ln -s /abs abslink; mkfifo fifo; echo b > "$(printf 'bad\377name')"; echo hidden > sub/.git/config
        long=$(printf 'n%.0s' $(seq 200)); mkdir -p $long/$long && echo deep > $long/$long/f
        chmod 000 empty; echo c > closed; chmod 000 closed
    """
    assert (await sandbox.exec(script)).ok
    members = await _download(sandbox, "/workspace/tree", exclude_names=[".git"])
    long = "n" * 200
    assert set(members) == {
        *("a", "abslink", "bad\udcffname", "closed", "empty", "sub", "sub/link"),
        *(long, f"{long}/{long}", f"{long}/{long}/f"),
    }
    assert members["a"].mode == 0o751
    assert members["a"].pax_headers["content"] == "a\n"
    assert members["sub/link"].linkname == "../../x"
    assert members["abslink"].linkname == "/abs"
    assert members["empty"].isdir()
    assert members["closed"].pax_headers["content"] == "c\n"
    with pytest.raises(FileNotFoundError):
        await _download(sandbox, "/workspace/none")


@on_module_loop
async def test_an_abandoned_download_ends(sandbox: LocalSandbox) -> None:
    await sandbox.exec("head -c 50000000 /dev/zero > big")
    stream = sandbox.download_tar("/workspace")
    assert len(await anext(stream)) > 0
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await sandbox.exec(["true"])).ok


@on_module_loop
async def test_a_tree_goes_in_and_comes_out_the_same(sandbox: LocalSandbox) -> None:
    data = _tar(
        ("d", {"type": tarfile.DIRTYPE, "mode": 0o500}),
        ("d/run", b"#!/bin/sh\n"),
        ("link", "d/run"),
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "d/run"}),
        ("./dup", b"first"),
        ("dup", b"second"),
    )
    await sandbox.upload_tar("/workspace/in", data)
    members = await _download(sandbox, "/workspace/in")
    assert {name: member.mode for name, member in members.items() if member.isdir()} == {"d": 0o500}
    assert members["dup"].pax_headers["content"] == "second"
    assert members["hard"].pax_headers["content"] == "#!/bin/sh\n"
    assert members["link"].linkname == "d/run"
    owner = await sandbox.exec("find in ! -user agent")
    assert owner.stdout == b""


HOSTILE = {
    "parent": _tar(("../out", b"x")),
    "absolute": _tar(("/tmp/out", b"x")),
    "hidden parent": _tar(("a/../../out", b"x")),
    "device": _tar(("dev", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})),
    "fifo": _tar(("fifo", {"type": tarfile.FIFOTYPE})),
    "hard link out": _tar(("h", {"type": tarfile.LNKTYPE, "linkname": "../../etc/passwd"})),
    "hard link through a link": _tar(("l", "/etc"), ("h", {"type": tarfile.LNKTYPE, "linkname": "l/passwd"})),
    "hard link to nothing": _tar(("h", {"type": tarfile.LNKTYPE, "linkname": "none"})),
    "deep": _tar(("/".join(["d"] * 3000), b"x")),
    "cut": _tar(("a", b"x" * 2000))[:1024],
    "noise": b"\x07" * 5000,
}


@on_module_loop
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_archives_are_refused(shared: LocalSandbox, name: str) -> None:
    with pytest.raises((SandboxError, FileNotFoundError)):
        await shared.upload_tar("/workspace/hostile", HOSTILE[name])
    assert not (await shared.exec("ls /tmp/out /workspace/out /out 2>/dev/null")).stdout


@on_module_loop
async def test_members_do_not_follow_links(sandbox: LocalSandbox) -> None:
    await sandbox.exec("mkdir in /tmp/outside; ln -s /tmp/outside in/planted")
    data = _tar(("out", "/tmp/outside"), ("out/file", b"x"), ("planted/file", b"y"), ("self", "."), ("self/z", b"z"))
    await sandbox.upload_tar("/workspace/in", data)
    assert (await sandbox.exec("ls /tmp/outside")).stdout == b""
    assert (await sandbox.exec("cat in/out/file in/planted/file in/self/z")).stdout == b"xyz"


@on_module_loop
async def test_a_tar_is_read_from_a_file(sandbox: LocalSandbox, tmp_path: Path) -> None:
    """It is larger than a pipe, and whoever refuses it does not wait for its end."""
    content = random.Random(1).randbytes(3 << 20)
    file = tmp_path / "x.tar"
    file.write_bytes(_tar(("d/big", content), ("l", "d/big")))
    await sandbox.upload_tar("/workspace/in", file)
    assert await sandbox.read_file("/workspace/in/l") == content
    file.write_bytes(_tar(("../out", content)))
    with pytest.raises(SandboxError):
        await sandbox.upload_tar("/workspace/in", file)
    with pytest.raises(FileNotFoundError):
        await sandbox.upload_tar("/workspace/in", tmp_path / "none.tar")


@on_module_loop
async def test_many_members(sandbox: LocalSandbox) -> None:
    block = _tar(("same", b""))[:512]
    await sandbox.upload_tar("/workspace/many", block * 3_000 + bytes(1024))
    assert (await sandbox.exec("ls many")).stdout == b"same\n"


@pytest.fixture(scope="module")
def hunted() -> Iterator[tuple[asyncio.Runner, LocalSandbox]]:
    """A sandbox on a loop of its own, for tests that are plain functions."""
    with asyncio.Runner() as runner:
        backend = LocalBackend()

        async def boot() -> LocalSandbox:
            made = await backend.create(SandboxSpec())
            await made.exec("mkdir -p in outside && echo 1 > outside/kept && ln -s ../outside in/planted")
            return made

        yield runner, runner.run(boot())
        runner.run(backend.close())


names = st.lists(
    st.sampled_from(["a", "b", "..", ".", "", "planted", "kept", "l", "\udcff", "x" * 120, "é", " "]),
    min_size=1,
    max_size=5,
).map("/".join)
targets = st.sampled_from(["..", "/", "../outside", "../outside/kept", "a", "planted/kept", "l", "/workspace/outside"])
contents = st.one_of(
    st.binary(max_size=20),
    targets,
    st.just({"type": tarfile.DIRTYPE, "mode": 0o755}),
    st.builds(lambda t: {"type": tarfile.LNKTYPE, "linkname": t}, targets),
    st.sampled_from([{"type": tarfile.FIFOTYPE}, {"type": tarfile.CHRTYPE}, {"type": b"Z"}]),
)


# A case goes through a sandbox and costs milliseconds; thousands that do not are in test_hostile_inputs.py.
cases = settings(max_examples=max(50, settings().max_examples // 20))


@cases
@given(members=st.lists(st.tuples(names, contents), max_size=6), cut=st.integers(0, 3), flip=st.integers(-1, 2000))
def test_no_archive_writes_outside_its_directory(
    hunted: tuple[asyncio.Runner, LocalSandbox], members: list[tuple[str, bytes | str]], cut: int, flip: int
) -> None:
    runner, sandbox = hunted
    data = bytearray(_tar(*members))
    if 0 <= flip < len(data):
        data[flip] ^= 0xFF
    data = data[: len(data) - cut * 512]

    async def attempt() -> None:
        try:
            await sandbox.upload_tar("/workspace/in", bytes(data))
        except (SandboxError, FileNotFoundError):
            pass
        kept = await _download(sandbox, "/workspace/outside")
        assert {name: member.pax_headers["content"] for name, member in kept.items()} == {"kept": "1\n"}
        for name in await _download(sandbox, "/workspace/in"):
            assert not name.startswith("/")
            assert ".." not in name.split("/")

    runner.run(attempt())


@on_module_loop
async def test_names_that_are_no_line(sandbox: LocalSandbox) -> None:
    names = ["a\nb", "\n", "back\\slash", "%s\n\\n ", "d\nir/e\nf"]
    await sandbox.exec(["sh", "-c", 'for name; do mkdir -p "$name/in/the/way"; done', "sh", *names[:4]])
    await sandbox.upload_tar("/workspace", _tar(*((name, name.encode()) for name in names)))
    for name in names:
        assert (await sandbox.exec(["cat", "--", name])).stdout == name.encode()
    assert {name for name, member in (await _download(sandbox, "/workspace")).items() if member.isreg()} == set(names)
