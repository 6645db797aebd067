"""Ten thousand hostile inputs per run in CI: whatever an archive, a layer, a tree or a path says, nothing gets out.

Case `n` is made from the seed `n`, so a failure names its case, and it is the same on every machine.
"""

import asyncio
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from sandlot.errors import SandboxError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.images.unpack import Unpacker
from sandlot.sandbox.jail import archive, tree
from sandlot.sandbox.local import LocalBackend
from support import hostile_tars

SHARE = 1 if os.environ.get("CI") else 10
UPLOADS, LAYERS, TREES, PATHS = 4000 // SHARE, 4000 // SHARE, 1000 // SHARE, 1000 // SHARE
MAX_BYTES = 1 << 20


class Ground:
    """A directory to be attacked, `r`, beside one that must stay as it is, `outside`."""

    def __init__(self, base: Path) -> None:
        self.base, self.root, self.outside = base, base / "r", base / "outside"
        self.outside.mkdir()
        (self.outside / "kept").write_text("1")
        self._before = self._state()

    def _state(self) -> list[tuple[str, int, int, int, int]]:
        found = []
        for path in (self.outside, self.outside / "kept"):
            status = path.lstat()
            found.append((path.name, status.st_mode, status.st_nlink, status.st_uid, status.st_mtime_ns))
        return found

    def attack(self, case: int, work: Callable[[], None]) -> None:
        self.root.mkdir()
        (self.root / "planted").symlink_to("../outside")
        with suppress(SandboxError, OSError):
            work()
        assert sorted(os.listdir(self.base)) == ["outside", "r"], case
        assert self._state() == self._before, case
        assert os.listdir(self.outside) == ["kept"], case
        assert (self.outside / "kept").read_text() == "1", case
        total = 0
        for directory, directories, files in os.walk(self.root):
            for name in (*directories, *files):
                status = os.lstat(os.path.join(directory, name))
                assert stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), case
                assert stat.S_ISDIR(status.st_mode) or not status.st_mode & 0o6000, case
                total += status.st_blocks * 512
        assert total < 4 * MAX_BYTES, case
        tree.remove(str(self.root))


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """On tmpfs where there is one, which makes thousands of trees cheap."""
    memory = Path("/dev/shm")
    base = memory / f"sandlot-hunt-{os.getpid()}" if os.access(memory, os.W_OK) else tmp_path / "hunt"
    base.mkdir()
    yield Ground(base)
    shutil.rmtree(base)


def test_no_uploaded_archive_gets_out(ground: Ground) -> None:
    def upload(case: int) -> None:
        with open(os.memfd_create("archive"), "w+b") as file:
            file.write(hostile_tars.make(Random(case), str(ground.outside), layer=False))
            file.seek(0)
            archive.unpack(str(ground.root), file.fileno())

    for case in range(UPLOADS):
        ground.attack(case, lambda case=case: upload(case))


def test_no_layer_gets_out(ground: Ground) -> None:
    owner = 5_000_000 if os.geteuid() == 0 else None

    def flatten(random: Random) -> None:
        unpacker = Unpacker(ground.root, owner, max_bytes=MAX_BYTES, max_entries=50)
        try:
            for _ in range(random.randrange(1, 4)):
                layer = hostile_tars.make(random, str(ground.outside), layer=True)
                unpacker.apply(io.BytesIO(layer), "a layer")
            unpacker.finish()
        finally:
            unpacker.close()

    for case in range(LAYERS):
        ground.attack(case, lambda case=case: flatten(Random(case)))


def _plant(random: Random, root: Path, outside: str) -> None:
    """A tree as a hostile program leaves it."""
    places = [root]
    for number in range(random.randrange(1, 8)):
        path = random.choice(places) / random.choice(
            [*(n for n in hostile_tars.NAMES if n not in ("", ".", "..")), str(number)]
        )
        if os.path.lexists(path):
            continue
        with suppress(OSError):
            kind = random.randrange(7)
            if kind == 0:
                os.mkfifo(path)
            elif kind == 1:
                path.symlink_to(random.choice([outside, f"{outside}/kept", "..", "/", "/proc/self/mem", "loop"]))
            elif kind == 2:
                with path.open("wb") as file:
                    file.truncate(random.choice([0, 1, 1 << 40]))
            elif kind == 3:
                os.link(f"{outside}/kept", path)
                path.unlink()
            elif kind == 4:
                path.mkdir(mode=random.choice([0o755, 0, 0o100]))
                places.append(path)
            else:
                path.write_bytes(random.randbytes(random.randrange(40)))
                path.chmod(random.choice([0o644, 0, 0o4755]))


def test_no_downloaded_tree_brings_in_what_is_outside(ground: Ground) -> None:
    def download(random: Random) -> None:
        _plant(random, ground.root, str(ground.outside))
        with open(os.memfd_create("out"), "w+b") as file:
            with suppress(OSError):
                archive.pack(str(ground.root), file.fileno(), frozenset(), MAX_BYTES)
            assert file.seek(0, os.SEEK_END) <= 2 * MAX_BYTES
            file.seek(0)
            with suppress(tarfile.ReadError), tarfile.open(fileobj=file, errors="surrogateescape") as packed:
                for member in packed:
                    assert member.isreg() or member.isdir() or member.issym()
                    assert not member.name.startswith("/")
                    assert ".." not in member.name.split("/")
                    assert "kept" not in member.name.split("/")[1:] or "planted" not in member.name
        tree.remove(str(ground.root))
        ground.root.mkdir()

    for case in range(TREES):
        ground.attack(case, lambda case=case: download(Random(case)))


PARTS = [
    "..",
    ".",
    "",
    "proc",
    "self",
    "fd",
    "1",
    "root",
    "dev",
    "tmp",
    "mem",
    "a",
    "l",
    "f",
    "environ",
    "x" * 300,
    "etc",
]


@pytest.mark.asyncio
async def test_no_path_hangs_or_reads_what_is_no_file() -> None:
    backend = LocalBackend()
    gate = asyncio.Semaphore(16)
    try:
        async with await backend.create(SandboxSpec()) as sandbox:
            await sandbox.exec("ln -s /proc/self/root l; mkfifo f; ln -s f a; ln -s / /tmp/l; mkfifo /tmp/f")

            async def attempt(case: int) -> None:
                random = Random(case)
                name = random.choice(["/", "", "/workspace/"]) + "/".join(
                    random.choices(PARTS, k=random.randrange(1, 6))
                )
                async with gate, asyncio.timeout(120):
                    with suppress(SandboxError, FileNotFoundError):
                        if random.random() < 0.5:
                            content = await sandbox.read_file(name)
                            assert b"PATH=" not in content, name
                            assert name.rstrip("/").rpartition("/")[2] not in ("mem", "environ", "f"), name
                        else:
                            await sandbox.write_file(name, b"x")

            await asyncio.gather(*(attempt(case) for case in range(PATHS)))
            assert (await sandbox.exec("ls -l /proc/1/exe 2>&1; echo alive")).stdout.endswith(b"alive\n")
    finally:
        await backend.close()
