"""Booting from every form of image; the machine's /usr is a layer, so that tiny images have a shell."""

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox import Layer, SandboxSpec
from sandlot.sandbox.local import LocalBackend
from support.image_files import Entry, directory, docker_archive, make_image, make_tar, write_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

USR = (Layer(Path("/usr"), "/usr"),)
LINKS: list[Entry] = [(name, f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin")]
ROOT: list[Entry] = [
    *LINKS,
    ("etc/passwd", b"root:x:0:0::/root:/bin/sh\nwww:x:33:33::/:/bin/false\n"),
    ("testbed", directory()),
    ("testbed/owned-by-root", {"data": b"code\n", "mode": 0o644}),
    ("testbed/sub/deep", {"data": b"deep\n", "mode": 0o600}),
    ("secret", {"data": b"s\n", "mode": 0o600}),
]
PATCH: list[Entry] = [("testbed/.wh.owned-by-root", b""), ("testbed/added", b"second\n")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(tmp_path_factory.mktemp("state"))
    yield made
    await made.close()


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout


FORMS: dict[str, Callable[[Path], Path]] = {
    "tar": lambda path: _written(path / "root.tar", make_tar(ROOT)),
    "tar.gz": lambda path: _written(path / "root.tar.gz", gzip.compress(make_tar(ROOT))),
    "tar.xz": lambda path: _written(path / "root.tar.xz", lzma.compress(make_tar(ROOT))),
    "tar.bz2": lambda path: _written(path / "root.tar.bz2", bz2.compress(make_tar(ROOT))),
    "tar.zst": lambda path: _written(path / "root.tar.zst", _zstd(make_tar(ROOT))),
    "docker-archive": lambda path: _written(
        path / "saved.tar", docker_archive([make_tar(ROOT), make_tar([]), make_tar([]), make_tar(PATCH)], ["A=image"])
    ),
    "oci layout": lambda path: write_layout(make_image([make_tar(ROOT), make_tar(PATCH)], ["A=image"]), path / "oci"),
    "oci layout, zstd": lambda path: write_layout(
        make_image([make_tar(ROOT), make_tar(PATCH)], ["A=image"], compress=_zstd), path / "oci"
    ),
}


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("form", "zstandard"), [*((form, True) for form in FORMS), ("tar.zst", False)])
async def test_every_form_boots(
    backend: LocalBackend, tmp_path: Path, form: str, zstandard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "zst" in form and shutil.which("zstd") is None:
        pytest.skip("no zstd here to make the image with")
    if not zstandard:
        monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    image = str(FORMS[form](tmp_path))
    async with await backend.create(SandboxSpec(image=image, layers=USR, workdir="/testbed")) as sandbox:
        layered = form.startswith(("docker", "oci"))
        seen = await sandbox.exec("whoami; ls; cat sub/deep; echo A=$A; grep -c www /etc/passwd")
        listing = "added\nsub\n" if layered else "owned-by-root\nsub\n"
        assert seen.text() == f"agent\n{listing}deep\nA={'image' if layered else ''}\n1\n"
        wrote = await sandbox.exec(
            "find /testbed ! -user agent; rm sub/deep; echo x > sub/new; ls sub; rm -r /testbed/*"
        )
        assert wrote.text() == "new\n"
        secret = await sandbox.exec("cat /secret")
        assert secret.ok == (sandbox.facts["users"] == "single")
        assert (await sandbox.exec("cat /secret", user="root")).stdout == b"s\n"
    async with await backend.create(SandboxSpec(image=image, layers=USR, workdir="/elsewhere")) as other:
        assert (await other.exec("cat /testbed/sub/deep", user="root")).stdout == b"deep\n"
        owner = await other.exec("stat -c %U /testbed /elsewhere")
        assert owner.stdout == (b"root\nagent\n" if other.facts["users"] == "range" else b"agent\nagent\n")


async def test_a_boot_copies_nothing_of_a_prepared_image(backend: LocalBackend, tmp_path: Path) -> None:
    image = str(_written(tmp_path / "root.tar", make_tar(ROOT)))
    async with await backend.create(SandboxSpec(image=image, layers=USR, workdir="/testbed")) as sandbox:
        upper = backend.run_dir / sandbox.id / "upper"
        assert [str(p.relative_to(upper)) for p in sorted(upper.rglob("*"))] in (["usr"], [])


async def test_a_snapshot_of_an_unpacked_image(backend: LocalBackend, tmp_path: Path) -> None:
    path = _written(tmp_path / "root.tar", make_tar(ROOT))
    spec = SandboxSpec(image=str(path), layers=USR, workdir="/testbed")
    first = await backend.create(spec)
    await first.exec("echo mine > mine; rm owned-by-root")
    snapshot = await first.snapshot()
    path.unlink()
    fork = SandboxSpec(snapshot=snapshot, layers=USR, workdir="/testbed")
    async with await backend.create(fork) as second:
        assert (await second.exec("cat mine sub/deep; ls")).stdout == b"mine\ndeep\nmine\nsub\n"
    await snapshot.discard()


async def test_hostile_images_boot_or_are_refused(backend: LocalBackend, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("1")
    for name, entries in {
        "etc": [("etc", str(outside)), *LINKS],
        "passwd": [("etc/passwd", str(outside / "kept")), *LINKS],
        "workdir": [("testbed", str(outside)), *LINKS],
        "tmp": [("tmp", "/proc/1/root"), ("home", "../../.."), *LINKS],
        "files": [(n, b"x") for n in ("proc", "dev", "home", "var")] + LINKS,
    }.items():
        image = str(_written(tmp_path / f"{name}.tar", make_tar(entries)))
        try:
            async with await backend.create(SandboxSpec(image=image, layers=USR, workdir="/testbed")) as sandbox:
                await sandbox.exec("echo x > /testbed/x; echo y > /etc/y", user="root")
        except SandboxError:
            pass
        assert {p.name: p.read_text() for p in outside.iterdir()} == {"kept": "1"}
        assert outside.stat().st_uid == os.geteuid()


async def test_what_is_no_image_is_told_so(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/index.json").write_text('{"manifests": []}')
    (tmp_path / "odd/oci-layout").touch()
    wrong = {
        "No:such:name": "no image reference",
        "dockerfile:/some/place": "take --sandbox docker",
        "tests": "neither",
        str(tmp_path / "none"): "neither",
        str(_written(tmp_path / "noise", os.urandom(4000))): "no tar archive",
        str(_written(tmp_path / "cut.gz", gzip.compress(make_tar(ROOT))[:200])): "cannot be decompressed",
        str(tmp_path / "odd"): "no one image",
    }
    for image, said in wrong.items():
        with pytest.raises(SandboxError, match=said) as caught:
            await backend.create(SandboxSpec(image=image))
        assert not caught.value.retryable
    with pytest.raises(SandboxUnavailableError):
        await backend.create(SandboxSpec(image="docker://NOT VALID"))
