"""Odd states of the agent's repository: the patch is the difference of its files to the base, and nothing of it runs.

Each state of `git_states.toml` is a shell script of what the agent did. `$RUN` in it leaves a mark: whatever is
configured with that command must not have run when the patch is there.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from sandlot.tasks import Repository
from sandlot.workspace.git import git_environment
from support.repositories import captured, checkout, git, repository, stream, write

BASE = {"a.py": "one\ntwo\nthree\n", "old.py": "old\n", "run.sh": "#!/bin/sh\n", "dir/inner.txt": "inner"}
CONFLICT = """
git checkout -q -f HEAD -- . && git clean -fdq
git checkout -q -b side && echo theirs > a.py && git commit -qam theirs
git checkout -q main && echo ours > a.py && git commit -qam ours
"""
_FILE = tomllib.loads(Path(__file__).with_name("git_states.toml").read_text())
STATES: dict[str, str] = {**_FILE["states"], **{n: CONFLICT + s for n, s in _FILE["after-a-conflict"].items()}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    place = tmp_path_factory.mktemp("base")
    origin = repository(place / "origin", {"a.py": "zero\n"}, BASE)
    return Repository(fast_export=stream(origin, place / "repo.fi"), base="refs/heads/base")


def edits(work: Path) -> None:
    write(work, {"a.py": "one\nTWO\nthree\n", "new.py": "new\n", "old.py": None})


def after(source: Repository, tmp_path: Path, state: str) -> tuple[Path, Path]:
    """A checkout in which the agent brought about `state`, and the mark that `$RUN` leaves."""
    work, out, mark = checkout(source, tmp_path / "work"), tmp_path / "out", tmp_path / "mark"
    out.mkdir()
    edits(work)
    environment = {"OUT": str(out), "RUN": f"touch {mark}", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(
        ["/bin/sh", "-ec", STATES[state]], cwd=work, check=True, capture_output=True, stdin=subprocess.DEVNULL,
        env={**git_environment(), **environment},
    )  # fmt: skip
    edits(work)
    return work, mark


def test_there_are_enough_of_them() -> None:
    assert len(STATES) == len(set(STATES.values())) >= 90


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_repository_does_not_matter(source: Repository, tmp_path: Path, state: str) -> None:
    work, mark = after(source, tmp_path, state)
    mark.unlink(missing_ok=True)  # the agent's own git may well run it
    patch, files = captured(source, work)
    assert not mark.exists()
    assert patch.files == ("a.py", "new.py", "old.py")
    assert files == {
        "a.py": b"one\nTWO\nthree\n", "new.py": b"new\n", "run.sh": b"#!/bin/sh\n", "dir/inner.txt": b"inner",
    }  # fmt: skip


@pytest.mark.parametrize(
    "state",
    ["file system monitor", "hooks", "hooks elsewhere", "filters by attributes", "large files stored elsewhere",
     "included settings", "config per work tree"],
)  # fmt: skip
def test_a_git_that_reads_the_repository_would_have_run_it(source: Repository, tmp_path: Path, state: str) -> None:
    work, mark = after(source, tmp_path, state)
    mark.unlink(missing_ok=True)
    git(work, "add", "-A", check=False)
    assert mark.exists()


def test_nothing_done_is_an_empty_patch(source: Repository, tmp_path: Path) -> None:
    patch, _ = captured(source, checkout(source, tmp_path / "work"))
    assert patch.empty
    assert patch.files == ()


def test_stashed_work_is_not_part_of_it(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    edits(work)
    git(work, "stash", "-q", "-u")
    write(work, {"b.py": "b\n"})
    assert captured(source, work)[0].files == ("b.py",)


def test_files_that_a_sparse_checkout_took_away_are_gone(source: Repository, tmp_path: Path) -> None:
    work = checkout(source, tmp_path / "work")
    git(work, "update-index", "-q", "--refresh")
    git(work, "sparse-checkout", "set", "--no-cone", "/*.py")
    assert sorted(os.listdir(work)) == [".git", "a.py", "old.py"]
    assert captured(source, work)[0].files == ("dir/inner.txt", "run.sh")
