"""Random repositories, random agents: capture, apply, and the same tree is there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandlot.tasks import Repository
from sandlot.workspace import Prepared
from sandlot.workspace.apply import apply_to_tree
from sandlot.workspace.capture import patch_of_tar
from sandlot.workspace.git import Store
from support.repositories import Content, checkout, git, prepared, repository, stream, tar_of, write

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
PARTS = ["a", "b", "c d", "é", os.fsdecode(b"\xff\xfe"), "-x", "t\tb", "n\nl", 'q"', "b\\", "~", "HEAD", "x.py"]
LINES = ["one", "two", "", " ", "+x", "-y", "@@ -1 +1 @@", "diff --git a/a b/a", "\r", "\\ No"]
BASES = 40
PATHS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("/".join)
TEXTS = st.lists(st.sampled_from(LINES)).map(lambda lines: "\n".join(lines).encode())
CONTENTS = st.one_of(TEXTS, TEXTS.map(lambda text: text + b"\n"), st.binary(max_size=40), PATHS.map(Path))
CHANGES = st.dictionaries(PATHS, st.one_of(CONTENTS, st.none()), max_size=6)
MODES = st.lists(st.integers(0, 5), max_size=3)


def tampered(name: str, content: bytes | None) -> Callable[[Path], None]:
    return lambda work: write(work, {f".git/{name}": content}) if (work / ".git").is_dir() else None


def nested(work: Path) -> None:
    for directory in sorted(path for path in work.iterdir() if path.is_dir() and path.name != ".git")[:1]:
        git(directory, "init", "-q", ".", check=False)
        git(directory, "add", "-A", check=False)


def no_git(work: Path) -> None:
    shutil.rmtree(work / ".git", ignore_errors=True)


ACTS: list[str | Callable[[Path], None]] = [
    "add -A", "commit -qam x", "commit -q --allow-empty -m y", "commit -q --amend --allow-empty -m z",
    "checkout -q -b new", "checkout -q --detach", "checkout -q --orphan empty", "reset -q --soft HEAD",
    "reset -q --hard", "stash -q -u", "tag t", "gc -q", "rm -rq --cached .", "clean -fdq", "update-ref -d HEAD",
    "read-tree --empty", "bisect start", "config core.autocrlf true", "config core.fileMode false",
    "config core.symlinks false", "config core.ignoreCase true", "config core.bare true",
    "config core.worktree ../../none", "sparse-checkout set a", "update-index --assume-unchanged a",
    "worktree add -q ../other", "replace HEAD HEAD",
    tampered("index", b"junk"), tampered("HEAD", b"ref: refs/heads/none\n"), tampered("index.lock", b""),
    tampered("config", b"["), tampered("objects", None), tampered("info/exclude", b"*\n"),
    tampered("info/attributes", b"* text eol=crlf filter=x\n"), nested, no_git,
]  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A random repository that agents start from: unpacked in `work`, and as the trusted side has it."""

    work: Path
    start: Prepared


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[Path]:
    """Temporary files of the test, and of what it calls, are in memory where the machine allows it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", home)
        yield Path(home)


@pytest.fixture(scope="module")
def base(memory: Path) -> Callable[[int], Base]:
    """The bases by number, each made once, in the way that a task's repository is."""

    @cache
    def made(number: int) -> Base:
        origin = repository(memory / f"{number}-origin", random_files(Random(number)))
        source = Repository(fast_export=stream(origin, memory / f"{number}.fi"), base="refs/heads/base")
        return Base(checkout(source, memory / f"{number}"), prepared(source))

    return made


def random_files(random: Random) -> dict[str, Content]:
    """Up to eight files and links, none below another."""
    files: dict[str, Content] = {}
    for _ in range(random.randrange(9)):
        name = "/".join(random.choices(PARTS, k=random.randint(1, 3)))
        text = "\n".join(random.choices(LINES, k=random.randrange(6))).encode()
        files[name] = random.choice([text, text + b"\n", random.randbytes(30), Path(random.choice(PARTS))])
    return {name: file for name, file in files.items() if not any(name.startswith(f"{other}/") for other in files)}


def apply_changes(work: Path, changes: dict[str, Content], modes: list[int]) -> None:
    for name, content in changes.items():
        parent = (work / name).parent
        while parent != work:
            if parent.is_symlink() or parent.is_file():
                parent.unlink()
            parent = parent.parent
        write(work, {name: content})
    regular = sorted(p for p in work.rglob("*") if p.is_file() and not p.is_symlink() and ".git" not in p.parts)
    for number in modes:
        if regular:
            path = regular[number % len(regular)]
            path.chmod(path.stat().st_mode ^ 0o111)


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    number=st.integers(0, BASES - 1),
    first=CHANGES,
    acts=st.lists(st.sampled_from(ACTS), max_size=3),
    second=CHANGES,
    modes=MODES,
)
def test_capture_then_apply_gives_the_same_tree(
    base: Callable[[int], Base],
    number: int,
    first: dict[str, Content],
    acts: list[str | Callable[[Path], None]],
    second: dict[str, Content],
    modes: list[int],
) -> None:
    start = base(number).start
    scratch = Path(tempfile.mkdtemp())
    try:
        work = scratch / "work"
        subprocess.run(["cp", "-a", base(number).work, work], check=True)
        apply_changes(work, first, modes)
        for act in acts:
            git(work, *act.split(), check=False) if isinstance(act, str) else act(work)
        apply_changes(work, second, modes[:1])
        patch = patch_of_tar(tar_of(work), start)
        store = Store.create(scratch / "proof", alternate=start.store)
        assert apply_to_tree(store, start.base_tree, patch.diff, scratch / "proof.index") == patch.tree
        assert patch.tree == tree_of(os.fsencode(work)).hex()
        assert patch.empty == (patch.tree == start.base_tree) == (not patch.files)
    finally:
        shutil.rmtree(scratch)


EMPTY = hashlib.sha1(b"tree 0\0").digest()


def tree_of(directory: bytes) -> bytes:
    """The id of the tree that git makes of a directory, by the definition of a tree and without git."""
    lines = []
    for entry in os.scandir(directory):
        if entry.name == b".git":
            continue
        if entry.is_dir(follow_symlinks=False):
            if (below := tree_of(entry.path)) != EMPTY:
                lines.append((entry.name + b"/", b"40000 %s\0%s" % (entry.name, below)))
            continue
        link = entry.is_symlink()
        data = os.readlink(entry.path) if link else Path(os.fsdecode(entry.path)).read_bytes()
        mode = b"120000" if link else b"100755" if entry.stat().st_mode & 0o100 else b"100644"
        blob = hashlib.sha1(b"blob %d\0%s" % (len(data), data)).digest()
        lines.append((entry.name, b"%s %s\0%s" % (mode, entry.name, blob)))
    body = b"".join(line for _, line in sorted(lines))
    return hashlib.sha1(b"tree %d\0%s" % (len(body), body)).digest()
