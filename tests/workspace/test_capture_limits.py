"""What a patch leaves out: over the cap, above the size of a file, and by the base's ignore rules."""

import os
from pathlib import Path

import pytest

from sandlot.errors import CaptureError
from sandlot.tasks import Repository
from sandlot.workspace.capture import patch_of_tar
from support.repositories import captured, checkout, prepared, repository, stream, tar_of, write

BASE = {"a.py": "one\n", "logo.png": b"\x89PNG\0\1\2" * 50, ".gitignore": "*.log\nbuild/\n", "kept.log": "tracked\n"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    place = tmp_path_factory.mktemp("base")
    return Repository(fast_export=stream(repository(place / "origin", BASE), place / "repo.fi"), base="refs/heads/base")


def test_ignore_rules_are_those_of_the_base(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    write(
        work,
        {
            ".gitignore": "new.py\n*\n",
            "new.py": "work\n",
            "noise.log": "left out by the base\n",
            "build/out.o": "left out",
            "kept.log": "tracked, so it counts\n",
            "pkg/__pycache__/m.cpython-311.pyc": b"\0",
            "pkg/sub/.gitignore": "!noise.log\n",
            "pkg/sub/noise.log": "",
        },
    )
    patch, files = captured(source, work)
    assert set(patch.files) == {".gitignore", "new.py", "kept.log", "pkg/sub/.gitignore"}
    assert files["kept.log"] == b"tracked, so it counts\n"


def test_over_the_cap_the_biggest_new_binaries_go_first(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    write(
        work,
        {
            "fix.py": "fix\n",
            "big.bin": b"\0" + os.urandom(60_000),
            "bigger.bin": b"\0" + os.urandom(90_000),
            "small.bin": b"\0" + os.urandom(100),
            "logo.png": b"\0" + os.urandom(20_000),
        },
    )
    patch, files = captured(source, work, max_bytes=40_000)
    assert patch.omitted == ("bigger.bin", "big.bin")
    assert {"fix.py", "small.bin", "logo.png"} <= set(files)
    assert len(patch.diff) <= 40_000
    everything, _ = captured(source, work, max_bytes=1 << 20)
    assert everything.omitted == ()


def test_what_cannot_be_cut_below_the_cap_is_an_error_and_not_an_empty_patch(
    source: Repository, tmp_path: Path
) -> None:
    work = checkout(source, tmp_path / "work")
    write(work, {"long.txt": "line\n" * 20_000, "new.bin": b"\0" * 10})
    with pytest.raises(CaptureError, match="more than 1000"):
        captured(source, work, max_bytes=1000)


def test_huge_files_are_never_held_in_memory(
    source: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandlot.workspace.snapshot.FILE_LIMIT", 1000)
    work = checkout(source, tmp_path / "work")
    write(work, {"huge.txt": "x" * 1001, "huge.log": "x" * 1001, "fits.txt": "x" * 1000})
    patch, _ = captured(source, work)
    assert (patch.files, patch.omitted) == (("fits.txt",), ("huge.txt",))
    write(work, {"a.py": "x" * 1001})
    with pytest.raises(CaptureError, match=r"a\.py of the base"):
        patch_of_tar(tar_of(work), prepared(source))


def test_a_huge_file_of_the_base_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = repository(tmp_path / "origin", {"huge.txt": "x" * 5000, "a.py": "a\n"})
    source = Repository(fast_export=stream(origin, tmp_path / "repo.fi"), base="base")
    work = checkout(source, tmp_path / "work")
    monkeypatch.setattr("sandlot.workspace.snapshot.FILE_LIMIT", 1000)
    write(work, {"a.py": "b\n"})
    patch, files = captured(source, work)
    assert (patch.files, patch.omitted, len(files["huge.txt"])) == (("a.py",), (), 5000)
