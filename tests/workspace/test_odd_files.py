"""Odd files: whatever lies in the work tree, the patch is its difference to the base to the byte, and it applies."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandlot.tasks import Repository
from support.repositories import Content, captured, checkout, git, repository, stream, write

BASE: dict[str, Content] = {
    "a.py": "one\ntwo\nthree\n",
    "old.py": "old\n",
    "logo.png": b"\x89PNG\0\1\2" * 50,
    "run.sh": "#!/bin/sh\n",
    "link": Path("a.py"),
    "crlf.txt": b"a\r\nb\r\n",
    "dir/inner.txt": "inner",
}


def made(place: Path, *commits: dict[str, Content]) -> Repository:
    return Repository(fast_export=stream(repository(place / "o", *commits), place / "repo.fi"), base="refs/heads/base")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return made(tmp_path_factory.mktemp("base"), BASE)


@pytest.fixture(scope="module")
def base(source: Repository, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the files of the base hold."""
    return captured(source, checkout(source, tmp_path_factory.mktemp("base") / "work"))[1]


NAMES = (
    "-", "--", "-rf",
    " lead", "trail ", "dot.", "new\nline", "tab\t", "quo\"te", "it's", "back\\slash", "a\rb", "*", "?.py",
    "[a", "#x", "!x", ":!x", ":(exclude)a.py", ":/a.py", "~", "$HOME", "`id`", "%00", "HEAD", "con", "nul.txt", "A.PY",
    "Dir/inner.txt", "git~1", ".git ", ".git.x", ".g\u200cit", "\u00e9", "e\u0301", os.fsdecode(b"\xff\xfe"), "x" * 255,
    "d/.gitkeep", ".gitmodules", ".gitattributes", "\x01\x7f",
)  # fmt: skip


def test_every_name_is_kept(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    write(work, dict.fromkeys(NAMES, "x\n"))
    patch, files = captured(source, work)
    assert {name: content for name, content in files.items() if name not in BASE} == dict.fromkeys(NAMES, b"x\n")
    assert len(patch.files) == len(NAMES)


DEEP = (
    "import os, sys\nfor _ in range(int(sys.argv[2])):\n  os.mkdir(sys.argv[1]); os.chdir(sys.argv[1])\nopen('f', 'w')"
)


@pytest.mark.parametrize(("name", "depth"), [("d", 380), ("d" * 250, 30)])
def test_paths_that_no_call_takes_whole(source: Repository, tmp_path: Path, name: str, depth: int) -> None:
    work = checkout(source, tmp_path / "work")
    subprocess.run([sys.executable, "-c", DEEP, name, str(depth)], cwd=work, check=True)
    _, files = captured(source, work)
    assert files["/".join([*[name] * depth, "f"])] == b""


Doing = Callable[[Path], object]
SITUATIONS: dict[str, tuple[Doing, dict[str, bytes | None]]] = {
    "hard links": (lambda w: os.link(w / "a.py", w / "b.py"), {"b.py": b"one\ntwo\nthree\n"}),
    "pipe": (lambda w: os.mkfifo(w / "pipe"), {}),
    "pipe over a file": (lambda w: (write(w, {"a.py": None}), os.mkfifo(w / "a.py")), {"a.py": None}),
    "socket": (lambda w: socket.socket(socket.AF_UNIX).bind(os.path.relpath(w / "s")), {}),
    "empty directories": (lambda w: (w / "e/f").mkdir(parents=True), {}),
    "directory emptied": (lambda w: (w / "dir/inner.txt").unlink(), {"dir/inner.txt": None}),
    "link to itself": (lambda w: write(w, {"loop": Path("loop")}), {"loop": b"loop"}),
    "links in a ring": (lambda w: write(w, {"x": Path("y"), "y": Path("x")}), {"x": b"y", "y": b"x"}),
    "link to the top": (lambda w: write(w, {"dir/up": Path("..")}), {"dir/up": b".."}),
    "link out": (lambda w: write(w, {"link": Path("/etc/passwd")}), {"link": b"/etc/passwd"}),
    "link far out": (lambda w: write(w, {"link": Path("../" * 40 + "etc")}), {"link": ("../" * 40 + "etc").encode()}),
    "link of 4,000 bytes": (lambda w: write(w, {"l": Path("x" * 4000)}), {"l": b"x" * 4000}),
    "link with a line break": (lambda w: write(w, {"l": Path("no where\n")}), {"l": b"no where\n"}),
    "link in place of a directory": (
        lambda w: write(w, {"dir": Path("/etc")}), {"dir": b"/etc", "dir/inner.txt": None},
    ),
    "file in place of a directory": (lambda w: write(w, {"dir": "f"}), {"dir": b"f", "dir/inner.txt": None}),
    "file in place of a link": (lambda w: write(w, {"link": "a.py"}), {"link": b"a.py"}),
    "directory in place of a link": (lambda w: write(w, {"link": None, "link/x": "x"}), {"link": None, "link/x": b"x"}),
    "directory in place of a file": (lambda w: write(w, {"a.py": None, "a.py/x": "x"}), {"a.py": None, "a.py/x": b"x"}),
    "file moved": (lambda w: os.rename(w / "a.py", w / "z.py"), {"a.py": None, "z.py": b"one\ntwo\nthree\n"}),
    "directory moved": (
        lambda w: os.rename(w / "dir", w / "new"), {"dir/inner.txt": None, "new/inner.txt": b"inner"},
    ),
    "moved by case": (lambda w: os.rename(w / "old.py", w / "OLD.py"), {"old.py": None, "OLD.py": b"old\n"}),
    "modes taken away": (lambda w: ((w / "dir").chmod(0), (w / "a.py").chmod(0)), {}),
    "modes of special use": (lambda w: (w / "a.py").chmod(0o6644), {}),
    "last line break gone": (lambda w: write(w, {"a.py": "one\ntwo\nthree"}), {"a.py": b"one\ntwo\nthree"}),
    "line ends of one kind": (lambda w: write(w, {"crlf.txt": b"a\nb\n"}), {"crlf.txt": b"a\nb\n"}),
    "line ends mixed": (lambda w: write(w, {"crlf.txt": b"a\r\nB\rc\n\r"}), {"crlf.txt": b"a\r\nB\rc\n\r"}),
    "text becomes binary": (lambda w: write(w, {"a.py": b"\0\1"}), {"a.py": b"\0\1"}),
    "binary becomes text": (lambda w: write(w, {"logo.png": "text\n"}), {"logo.png": b"text\n"}),
    "text that is a patch": (lambda w: write(w, {"p": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y"}),
                             {"p": b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y"}),
    "file emptied": (lambda w: write(w, {"a.py": ""}), {"a.py": b""}),
    "one line of a megabyte": (lambda w: write(w, {"long": "x" * (1 << 20)}), {"long": b"x" * (1 << 20)}),
    "file of holes": (lambda w: os.truncate(_touched(w / "holes"), 1 << 20), {"holes": bytes(1 << 20)}),
    "times of long ago": (lambda w: os.utime(w / "a.py", (0, 0)), {}),
    "same size and time": (lambda w: _same_time(w / "old.py", b"OLD\n"), {"old.py": b"OLD\n"}),
    "nothing left": (lambda w: [write(w, {n: None}) for n in os.listdir(w)], dict.fromkeys(BASE)),
    "2,000 files": (lambda w: write(w, {f"m/{i % 40}/{i}": f"{i}" for i in range(2000)}),
                    {f"m/{i % 40}/{i}": b"%d" % i for i in range(2000)}),
}  # fmt: skip


def _touched(path: Path) -> Path:
    path.touch()
    return path


def _same_time(path: Path, content: bytes) -> None:
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", SITUATIONS)
def test_odd_files(source: Repository, base: dict[str, bytes], tmp_path: Path, name: str) -> None:
    work = checkout(source, tmp_path / "work")
    doing, wanted = SITUATIONS[name]
    doing(work)
    patch, files = captured(source, work, 1 << 30)
    assert files == {n: content for n, content in {**base, **wanted}.items() if content is not None}
    assert len(patch.files) == len(wanted)


def test_modes_are_those_of_the_owner(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    for name, mode in {"run.sh": 0o755, "a.py": 0o700, "old.py": 0o611, "crlf.txt": 0o667}.items():
        (work / name).chmod(mode)
    patch, _ = captured(source, work)
    assert patch.files == ("a.py", "run.sh")
    assert patch.diff.count(b"old mode 100644\nnew mode 100755") == 2


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


SUBMODULE = "[submodule 'lib']\n\tpath = lib\n\turl = https://example.invalid/lib\n"


@pytest.mark.parametrize("how", ["dirty", "committed", "git gone", "removed", "replaced"])
def test_submodules_of_the_base_are_captured_as_files(tmp_path: Path, how: str) -> None:
    inner = repository(tmp_path / "inner", {"x.py": "x\n"})
    outer = repository(tmp_path / "outer", {"a.py": "a\n"})
    git(outer, "submodule", "--quiet", "add", str(inner), "lib")
    git(outer, "commit", "-q", "-m", "With a submodule")
    source = Repository(fast_export=stream(outer, tmp_path / "repo.fi"), base="refs/heads/base")
    work = checkout(source, tmp_path / "work")
    git(work, "clone", "-q", str(inner), "lib")
    write(work, {"lib/x.py": "changed\n"})
    match how:
        case "committed":
            git(work / "lib", "commit", "-qam", "inner")
            git(work, "commit", "-qam", "outer")
        case "git gone":
            write(work, {"lib/.git": None})
        case "removed":
            git(work, "rm", "-qf", "--cached", "lib")
            write(work, {".gitmodules": None})
        case "replaced":
            write(work, {"lib": "a file\n"})
    patch, files = captured(source, work)
    assert b"160000" not in patch.diff
    assert files["lib" if how == "replaced" else "lib/x.py"] == (b"a file\n" if how == "replaced" else b"changed\n")
    assert (".gitmodules" in files) == (how != "removed")


@pytest.mark.parametrize(
    "attribute",
    [
        "* text=auto eol=crlf",
        "* text eol=lf",
        "*.txt filter=lfs diff=lfs",
        "*.txt binary",
        "* export-ignore",
        "*.txt ident export-subst",
        "*.txt working-tree-encoding=UTF-16LE",
        "* -diff -merge",
        "*.txt whitespace=cr-at-eol",
    ],
)
def test_attributes_of_the_repository_change_no_byte(tmp_path: Path, attribute: str) -> None:
    files = {".gitattributes": f"{attribute}\n", "t.txt": "a\nb\n", "u.txt": "c\n"}
    source = Repository(fast_export=stream(repository(tmp_path / "o", files), tmp_path / "repo.fi"), base="base")
    work = checkout(source, tmp_path / "work")
    assert captured(source, work)[0].empty
    text = (work / "t.txt").read_bytes()
    (work / "t.txt").write_bytes(text + b"mixed\r\nends\n")
    write(work, {".gitattributes": "* -diff filter=evil\n"})
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
