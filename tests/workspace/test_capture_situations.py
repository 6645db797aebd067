"""Odd git situations: whatever the agent did, the patch is the difference of its files to the base, and it applies."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandlot.errors import CaptureError
from sandlot.tasks import Repository
from sandlot.workspace import Patch
from sandlot.workspace.apply import apply_to_tree
from sandlot.workspace.capture import patch_of_tar
from sandlot.workspace.git import Store
from support.repositories import checkout, git, prepared, repository, stream, tar_of, write

BASE = {
    "a.py": "one\ntwo\nthree\n",
    "old.py": "old\n",
    "logo.png": b"\x89PNG\0\1\2" * 50,
    "run.sh": "#!/bin/sh\n",
    "link": Path("a.py"),
    "crlf.txt": b"a\r\nb\r\n",
    "dir/inner.txt": "inner",
    ".gitignore": "*.log\nbuild/\n",
    "kept.log": "tracked although ignored\n",
}


@pytest.fixture
def source(tmp_path: Path) -> Repository:
    origin = repository(tmp_path / "origin", {"a.py": "zero\n"}, BASE)
    return Repository(fast_export=stream(origin, tmp_path / "repo.fi"), base="refs/heads/base")


def captured(source: Repository, work: Path, max_bytes: int = 1 << 20) -> tuple[Patch, dict[str, bytes]]:
    """The patch of `work`, proven by applying it to the base; with the resulting files."""
    base = prepared(source)
    patch = patch_of_tar(tar_of(work), base, max_bytes)
    store = Store.create(work.parent / "proof", alternate=base.store)
    assert apply_to_tree(store, base.base_tree, patch.diff, work.parent / "proof.index") == patch.tree
    entries = store.entries(patch.tree)
    contents = dict(zip(entries, store.blobs([entry.blob for entry in entries.values()]), strict=True))
    return patch, {os.fsdecode(path): content for path, content in contents.items()}


def edits(work: Path) -> None:
    write(work, {"a.py": "one\nTWO\nthree\n", "new.py": "new\n", "old.py": None})


def stage_one(work: Path) -> None:
    git(work, "add", "new.py")


def commit(work: Path) -> None:
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "done")


def branch(work: Path) -> None:
    git(work, "checkout", "-q", "-b", "fix")
    commit(work)


def back_to_main_with_the_files(work: Path) -> None:
    branch(work)
    git(work, "symbolic-ref", "HEAD", "refs/heads/main")


def amend(work: Path) -> None:
    git(work, "add", "-A")
    git(work, "commit", "-q", "--amend", "-m", "all new")


def detach(work: Path) -> None:
    git(work, "checkout", "-q", "--detach")
    commit(work)


def reset_softly(work: Path) -> None:
    git(work, "reset", "-q", "--soft", "HEAD~1")


def lock_index(work: Path) -> None:
    (work / ".git" / "index.lock").write_text("")


def corrupt_index(work: Path) -> None:
    (work / ".git" / "index").write_bytes(b"junk")


def delete_git(work: Path) -> None:
    write(work, {".git": None})


def new_git(work: Path) -> None:
    delete_git(work)
    git(work, "init", "-q")
    commit(work)


def git_is_a_file(work: Path) -> None:
    write(work, {".git": "gitdir: /nowhere\n"})


def orphan(work: Path) -> None:
    git(work, "checkout", "-q", "--orphan", "bare")
    commit(work)


def hooks(work: Path) -> None:
    write(work, {".git/hooks/pre-commit": "#!/bin/sh\nrm -f new.py\n", ".git/hooks/post-index-change": "exit 1"})
    for hook in (work / ".git" / "hooks").iterdir():
        hook.chmod(0o755)


def hostile_config(work: Path) -> None:
    for key, value in {
        "core.autocrlf": "true", "core.fsmonitor": "touch /tmp/sandlot-was-here", "core.fileMode": "false",
        "diff.external": "true", "core.worktree": "/", "core.hooksPath": "/tmp", "core.attributesFile": "/etc/passwd",
        "filter.x.clean": "echo cleaned", "diff.noprefix": "true", "core.quotePath": "false", "diff.renames": "copies",
    }.items():  # fmt: skip
        git(work, "config", key, value, check=False)


def info_attributes(work: Path) -> None:
    write(work, {".git/info/attributes": "* filter=x diff=y -text\n", ".git/info/exclude": "*\n"})


def assume_unchanged(work: Path) -> None:
    git(work, "update-index", "--assume-unchanged", "a.py")
    git(work, "update-index", "--skip-worktree", "dir/inner.txt")


def sparse(work: Path) -> None:
    git(work, "config", "core.sparseCheckout", "true")
    write(work, {".git/info/sparse-checkout": "/a.py\n"})


def replace_refs(work: Path) -> None:
    git(work, "replace", "HEAD", "HEAD~1")


def other_worktree(work: Path) -> None:
    git(work, "worktree", "add", "-q", str(work.parent / "elsewhere"))


def in_a_merge(work: Path) -> None:
    write(work, {".git/MERGE_HEAD": git(work, "rev-parse", "HEAD~1")})


def ref_names(work: Path) -> None:
    git(work, "tag", "HEAD")
    git(work, "branch", "refs/heads/main")


def reads_only_refs(work: Path) -> None:
    write(work, {".git/HEAD": "ref: refs/heads/none\n"})


@pytest.mark.parametrize(
    "did",
    [
        lambda work: None, stage_one, commit, branch, back_to_main_with_the_files, amend, detach, reset_softly,
        lock_index, corrupt_index, delete_git, new_git, git_is_a_file, orphan, hooks, hostile_config, info_attributes,
        assume_unchanged, sparse, replace_refs, other_worktree, in_a_merge, ref_names, reads_only_refs,
    ],
    ids=lambda did: did.__name__.strip("<>"),
)  # fmt: skip
def test_git_state_does_not_matter(source: Repository, tmp_path: Path, did: Callable[[Path], None]) -> None:
    work = checkout(source, tmp_path / "work")
    edits(work)
    did(work)
    patch, files = captured(source, work)
    assert patch.files == ("a.py", "new.py", "old.py")
    assert files["a.py"] == b"one\nTWO\nthree\n"
    assert files["new.py"] == b"new\n"
    assert "old.py" not in files


def test_nothing_done_is_an_empty_patch(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    patch, _ = captured(source, work)
    assert patch.empty
    assert patch.tree == prepared(source).base_tree
    assert patch.files == ()


def test_stashed_work_is_not_part_of_it(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    edits(work)
    git(work, "stash", "-q", "-u")
    write(work, {"b.py": "b\n"})
    patch, _ = captured(source, work)
    assert patch.files == ("b.py",)


def test_binaries_modes_links_and_bytes_are_exact(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    noise = bytes(range(256)) * 2
    write(
        work,
        {
            "f.py": "fix",
            "out.bin": noise,
            "logo.png": None,
            "link": Path("/etc/passwd"),
            "dangling": Path("no where\n"),
            "crlf.txt": b"a\r\nB\r\nlone\r",
            "a.py": b"one\ntwo\nthree",
            "dir": "a file now\n",
            "old.py": Path("run.sh"),
            os.fsdecode(b"na\xefve\xff.txt"): b"\xff\xfe\n",
            'new\nline "quoted"\ttab.txt': "x\n",
            "sp ace/b\\c.txt": "y\n",
            "empty": "",
        },
    )
    (work / "run.sh").chmod(0o755)
    patch, files = captured(source, work)
    assert files["out.bin"] == noise
    assert files["link"] == b"/etc/passwd"
    assert files["crlf.txt"] == b"a\r\nB\r\nlone\r"
    assert files["a.py"] == b"one\ntwo\nthree"
    assert files["dir"] == b"a file now\n"
    assert files[os.fsdecode(b"na\xefve\xff.txt")] == b"\xff\xfe\n"
    assert files['new\nline "quoted"\ttab.txt'] == b"x\n"
    assert files["empty"] == b""
    assert "logo.png" not in files
    assert b"old mode 100644\nnew mode 100755" in patch.diff
    assert "na\\xefve\\xff.txt" not in files
    assert any(name.startswith("na") and name.endswith("\\xff.txt") for name in patch.files)


def test_directory_in_place_of_file_and_of_link(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    write(work, {"a.py": None, "a.py/__init__.py": "x\n", "link": None, "link/deep/er.txt": "y\n"})
    _, files = captured(source, work)
    assert files["a.py/__init__.py"] == b"x\n"
    assert files["link/deep/er.txt"] == b"y\n"


@pytest.mark.parametrize("how", ["repository", "empty_directory", "file", "bare_inside", "upper_case"])
def test_nested_repositories_are_plain_files(source: Repository, tmp_path: Path, how: str) -> None:
    work = checkout(source, tmp_path / "work")
    write(work, {"pkg/m.py": "m\n"})
    match how:
        case "repository":
            git(work / "pkg", "init", "-q")
            git(work / "pkg", "add", "-A")
            git(work / "pkg", "commit", "-q", "-m", "inner")
        case "empty_directory":
            (work / "pkg" / ".git").mkdir()
        case "file":
            (work / "pkg" / ".git").write_text("gitdir: ../.git/modules/pkg\n")
        case "bare_inside":
            write(work, {"pkg/HEAD": "ref: refs/heads/x\n", "pkg/objects/x": "", "pkg/refs/y": ""})
        case "upper_case":
            write(work, {"pkg/.GIT/config": "[core]\n"})
    patch, files = captured(source, work)
    assert files["pkg/m.py"] == b"m\n"
    assert b"160000" not in patch.diff
    assert not any(".git/" in name.lower() for name in files)


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
    everything, _ = captured(source, checkout_of(work, tmp_path), max_bytes=1 << 20)
    assert everything.omitted == ()


def checkout_of(work: Path, tmp_path: Path) -> Path:
    place = tmp_path / "again" / "work"
    place.parent.mkdir()
    return work.rename(place)


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


def test_a_submodule_of_the_base_is_captured_with_its_prefix(tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", {"x.py": "x\n"})
    outer = repository(tmp_path / "outer", {"a.py": "a\n"})
    git(outer, "submodule", "--quiet", "add", str(inner), "lib")
    git(outer, "commit", "-q", "-m", "With a submodule")
    source = Repository(fast_export=stream(outer, tmp_path / "repo.fi"), base="refs/heads/base")
    work = checkout(source, tmp_path / "work")
    write(work, {"lib/x.py": "changed\n"})
    patch, files = captured(source, work)
    assert patch.files == ("lib/x.py",)
    assert files["lib/x.py"] == b"changed\n"


@pytest.mark.parametrize(
    "attribute", ["* text eol=crlf", "*.txt filter=lfs diff=lfs", "*.txt binary", "* export-ignore"]
)
def test_attributes_of_the_repository_change_no_byte(tmp_path: Path, attribute: str) -> None:
    files = {".gitattributes": f"{attribute}\n", "t.txt": "a\nb\n", "u.txt": "c\n"}
    source = Repository(fast_export=stream(repository(tmp_path / "o", files), tmp_path / "repo.fi"), base="base")
    work = checkout(source, tmp_path / "work")
    assert captured(source, work)[0].empty
    text = (work / "t.txt").read_bytes()
    (work / "t.txt").write_bytes(text + b"mixed\r\nends\n")
    write(work, {".gitattributes": "* -diff filter=evil\n"})
    work = checkout_of(work, tmp_path)
    patch, found = captured(source, work)
    assert found["t.txt"] == text + b"mixed\r\nends\n"
    assert set(patch.files) == {".gitattributes", "t.txt"}


def test_a_plain_directory_becomes_a_repository_of_one_commit(tmp_path: Path) -> None:
    write(
        tmp_path / "plain",
        {"a.py": "a\n", "bin/run": "#!/bin/sh\n", "l": Path("a.py"), "x.log": "x", ".gitignore": "*.log"},
    )
    (tmp_path / "plain" / "bin" / "run").chmod(0o755)
    source = Repository(directory=tmp_path / "plain")
    work = checkout(source, tmp_path / "work")
    assert git(work, "log", "--format=%s").split("\n") == ["Initial commit", ""]
    assert git(work, "status", "--porcelain", "--ignored") == ""
    write(work, {"a.py": "b\n"})
    patch, files = captured(source, work)
    assert patch.files == ("a.py",)
    assert files["x.log"] == b"x"
    assert (work / "bin" / "run").stat().st_mode & 0o100
