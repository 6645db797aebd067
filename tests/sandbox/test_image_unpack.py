"""Flattening layers: what OCI says they mean, and that no archive, however hostile, reaches outside."""

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandlot.errors import SandboxError
from sandlot.sandbox.images.unpack import Unpacker
from support.image_files import Entry, directory, make_tar


def _flatten(root: Path, *layers: Sequence[Entry] | bytes, **options: Any) -> Path:
    root.mkdir(exist_ok=True)
    unpacker = Unpacker(root, options.pop("owner", None), **{"max_bytes": 1 << 26, **options})
    try:
        for layer in layers:
            unpacker.apply(io.BytesIO(layer if isinstance(layer, bytes) else make_tar(layer)), "layer")
        unpacker.finish()
    finally:
        unpacker.close()
    return root


def _tree(root: Path) -> dict[str, str]:
    """Path → content of a file, target of a link, `/` for a directory."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def test_layers_lie_over_each_other(tmp_path: Path) -> None:
    root = _flatten(
        tmp_path / "r",
        [("a/keep", b"1"), ("a/gone", b"2"), ("b/x", b"3"), ("file", b"4"), ("dir/y", b"5"), ("l", "file")],
        [("a/.wh.gone", b""), ("a/new", b"6"), (".wh.b", b""), ("file", directory()), ("file/in", b"7"), ("dir", b"8")],
        [("l", b"9")],
    )
    assert _tree(root) == {
        "a": "/",
        "a/keep": "1",
        "a/new": "6",
        "file": "/",
        "file/in": "7",
        "dir": "8",
        "l": "9",
    }


def test_an_opaque_directory_hides_what_is_below_wherever_its_mark_stands(tmp_path: Path) -> None:
    lower = [("d/old", b"1"), ("d/sub/old", b"2"), ("e/old", b"3")]
    for number, order in enumerate((0, 1, 2)):
        upper: list[Entry] = [("d/new", b"4"), ("d/sub/new", b"5")]
        upper.insert(order, ("d/.wh..wh..opq", b""))
        root = _flatten(tmp_path / str(number), lower, upper)
        assert _tree(root) == {"d": "/", "d/new": "4", "d/sub": "/", "d/sub/new": "5", "e": "/", "e/old": "3"}


def test_a_whiteout_spares_what_its_own_layer_brings(tmp_path: Path) -> None:
    root = _flatten(
        tmp_path / "r", [("d/old", b"1"), ("f", b"2")], [("d/new", b"3"), ("f", b"4"), (".wh.d", b""), (".wh.f", b"")]
    )
    assert _tree(root) == {"d": "/", "d/new": "3", "f": "4"}


def test_links_in_parents_lead_where_they_lead_inside(tmp_path: Path) -> None:
    root = _flatten(
        tmp_path / "r",
        [("usr/lib/a", b"1"), ("lib", "usr/lib"), ("abs", "/usr/lib"), ("up", "../../../usr/lib"), ("void", "none")],
        [("lib/b", b"2"), ("abs/c", b"3"), ("up/d", b"4"), ("void/e", b"5"), ("lib/.wh.a", b"")],
    )
    assert {k: v for k, v in _tree(root).items() if "/" in k} == {
        "usr/lib": "/",
        "usr/lib/b": "2",
        "usr/lib/c": "3",
        "usr/lib/d": "4",
        "void/e": "5",
    }
    assert (root / "lib").is_symlink()


def test_modes_times_owners_and_hard_links(tmp_path: Path) -> None:
    members: list[Entry] = [
        ("d", directory(0o555, mtime=1000)),
        ("d/f", {"data": b"x", "mode": 0o4711, "mtime": 2000, "uid": 7, "gid": 8}),
        ("h", {"type": tarfile.LNKTYPE, "linkname": "d/f"}),
        ("s", {"type": tarfile.SYMTYPE, "linkname": "d/f", "uid": 7}),
        ("big", {"data": b"y", "uid": 1 << 20}),
        ("null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("fifo", {"type": tarfile.FIFOTYPE}),
    ]
    owner = 5_000_000 if os.geteuid() == 0 else None
    root = _flatten(tmp_path / "r", members, owner=owner)
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o555
    assert ((root / "d").stat().st_mtime, (root / "d/f").stat().st_mtime) == (1000, 2000)
    assert stat.S_IMODE((root / "d/f").stat().st_mode) == 0o711
    assert (root / "h").stat().st_ino == (root / "d/f").stat().st_ino
    assert set(os.listdir(root)) == {"d", "h", "s", "big"}
    if owner:
        assert ((root / "d/f").stat().st_uid, (root / "d/f").stat().st_gid) == (owner + 7, owner + 8)
        assert (root / "s").lstat().st_uid == owner + 7
        assert (root / "big").stat().st_uid == owner + 65534


def _gnu_sparse_of(size: int) -> bytes:
    header = bytearray(make_tar([("sparse", b"")])[:512])
    header[156:157] = b"S"
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


HOSTILE: dict[str, Sequence[Entry] | bytes] = {
    "parent": [("../out", b"x")],
    "parent in the middle": [("a/../../out", b"x")],
    "hard link to a parent": [("h", {"type": tarfile.LNKTYPE, "linkname": "../outside/kept"})],
    "hard link through a link": [("l", "/outside"), ("h", {"type": tarfile.LNKTYPE, "linkname": "l/kept"})],
    "hard link to nothing": [("h", {"type": tarfile.LNKTYPE, "linkname": "none"})],
    "hard link to a directory": [("d", directory()), ("h", {"type": tarfile.LNKTYPE, "linkname": "d"})],
    "too deep": [("/".join(["d"] * 300), b"x")],
    "a long name": [("n" * 300, b"x")],
    "too large": [("a", {"size": 1 << 40})],
    "too large, in sparse clothes": _gnu_sparse_of(1 << 33),
    "too many": [(str(n), b"") for n in range(60)],
    "cut": make_tar([("a", b"x" * 2000)])[:1024],
    "noise": os.urandom(5000),
    "a header larger than memory": make_tar([("a", {"type": tarfile.XHDTYPE, "size": 1 << 33})]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused_and_touch_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").write_text("1")
    with pytest.raises(SandboxError):
        _flatten(tmp_path / "r", HOSTILE[name], max_entries=50)
    assert sorted(os.listdir(tmp_path)) == ["outside", "r"]
    assert _tree(tmp_path / "outside") == {"kept": "1"}
    assert (tmp_path / "outside/kept").stat().st_nlink == 1


def test_links_and_absolute_names_stay_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("1")
    members: list[Entry] = [
        *(("one", str(outside)), ("one/x", b"a"), ("two", "../outside"), ("two/kept", b"b"), ("/abs", b"c")),
        *(("l", str(outside / "kept")), ("l", b"d"), ("proc", "/proc/self/root"), ("proc/tmp/y", b"e")),
    ]
    root = _flatten(tmp_path / "r", members, [("one/.wh.kept", b""), (".wh.two", b"")])
    assert _tree(outside) == {"kept": "1"}
    assert (root / "abs").read_text() == "c"
    assert (root / "l").read_text() == "d"
    assert not (root / "l").is_symlink()


names = st.lists(
    st.sampled_from(
        ["a", "b", "..", ".", "", "planted", "kept", "l", "\udcff", "x" * 120, ".wh.a", ".wh..wh..opq", ".wh."]
    ),
    min_size=1,
    max_size=5,
).map("/".join)
targets = st.sampled_from(["..", "/", "../outside", "../outside/kept", "a", "l/kept", "l", "/proc/self/cwd", "."])
contents = st.one_of(
    st.binary(max_size=20),
    targets,
    st.just(directory(0o700)),
    st.just(directory(0)),
    st.builds(lambda t: {"type": tarfile.LNKTYPE, "linkname": t}, targets),
    st.sampled_from(
        [{"type": tarfile.FIFOTYPE}, {"type": tarfile.CHRTYPE}, {"type": b"Z"}, {"size": -1}, {"mtime": 2**40}]
    ),
)
cases = settings(
    max_examples=max(300, settings().max_examples // 10), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@cases
@given(
    layers=st.lists(st.lists(st.tuples(names, contents), max_size=6), min_size=1, max_size=3),
    flip=st.integers(-500, 3000),
    bits=st.integers(1, 255),
    cut=st.integers(0, 3),
    packed=st.booleans(),
)
def test_no_archive_reaches_outside(
    tmp_path_factory: pytest.TempPathFactory,
    layers: list[list[Entry]],
    flip: int,
    bits: int,
    cut: int,
    packed: bool,
) -> None:
    base = tmp_path_factory.mktemp("hunt")
    outside = base / "outside"
    outside.mkdir()
    (outside / "kept").write_text("1")
    try:
        made = []
        for layer in layers:
            data = bytearray(make_tar(layer))
            if 0 <= flip < len(data):
                data[flip] ^= bits
            made.append(bytes(data[: len(data) - cut * 512]))
        _flatten(base / "r", *made)
        if packed:
            unpacker = Unpacker(base / "r", None, max_bytes=1 << 20)
            with gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(made[0])[: -cut or None])) as stream:
                unpacker.apply(stream, "packed")  # type: ignore[arg-type]
            unpacker.close()
    except SandboxError:
        pass
    finally:
        assert sorted(os.listdir(base)) in (["outside", "r"], ["outside"])
        assert _tree(outside) == {"kept": "1"}
        assert (outside / "kept").stat().st_nlink == 1
