"""Random repositories, random agents: capture, apply, and the same tree is there."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandlot.tasks import Repository
from sandlot.workspace.apply import apply_to_tree
from sandlot.workspace.capture import patch_of_tar
from sandlot.workspace.git import Store, run_git
from support.repositories import Content, checkout, git, prepared, repository, stream, tar_of, write

PARTS = st.sampled_from(
    ["a", "b", "c d", "é", os.fsdecode(b"\xff\xfe"), "-x", "t\tb", 'q"', "b\\", "~", "HEAD", "x.py"]
)
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
TEXTS = st.lists(
    st.sampled_from(["one", "two", "", " ", "+x", "-y", "@@ -1 +1 @@", "diff --git a/a b/a", "\r", "\\ No"])
).map(lambda lines: "\n".join(lines).encode())
CONTENTS = st.one_of(
    TEXTS, TEXTS.map(lambda t: t + b"\n"), st.binary(max_size=40), PATHS.map(lambda p: Path(p.replace("\0", "")))
)
FILES = st.dictionaries(PATHS, CONTENTS, max_size=6)
CHANGES = st.dictionaries(PATHS, st.one_of(CONTENTS, st.none()), max_size=6)
ACTS = st.sampled_from(
    ["add -A", "commit -qam x", "commit -q --allow-empty -m y", "checkout -q -b new", "reset -q --soft HEAD",
     "stash -q", "checkout -q --detach", "tag t", "gc -q", "rm -rq --cached .", "clean -fdq", "update-ref -d HEAD"]
)  # fmt: skip
MODES = st.lists(st.integers(0, 5), max_size=3)


def fitting(files: dict[str, Content]) -> dict[str, Content]:
    """Without paths that lie below another file."""
    return {p: c for p, c in files.items() if not any(p.startswith(f"{other}/") for other in files)}


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


@settings(max_examples=300 if os.environ.get("CI") else 40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(base=FILES, first=CHANGES, acts=st.lists(ACTS, max_size=3), second=CHANGES, modes=MODES)
def test_capture_then_apply_gives_the_same_tree(
    base: dict[str, Content], first: dict[str, Content], acts: list[str], second: dict[str, Content], modes: list[int]
) -> None:
    scratch = Path(tempfile.mkdtemp())
    try:
        origin = repository(scratch / "origin", fitting(base))
        source = Repository(fast_export=stream(origin, scratch / "repo.fi"), base="refs/heads/base")
        work = checkout(source, scratch / "work")
        apply_changes(work, first, modes)
        for act in acts:
            git(work, *act.split(), check=False)
        apply_changes(work, second, modes[:1])
        start = prepared(source)
        patch = patch_of_tar(tar_of(work), start)
        store = Store.create(scratch / "proof", alternate=start.store)
        assert apply_to_tree(store, start.base_tree, patch.diff, scratch / "proof.index") == patch.tree
        assert patch.tree == honest_tree(work, scratch)
        assert patch.empty == (patch.tree == start.base_tree)
    finally:
        shutil.rmtree(scratch)


def honest_tree(work: Path, scratch: Path) -> str:
    """The tree that git itself makes of the files, in a repository that the agent never saw."""
    shutil.rmtree(work / ".git")
    store = Store.create(scratch / "honest").with_index(scratch / "honest.index")
    run_git(
        f"--work-tree={work}", "add", "--all", "--force", ".", cwd=work,
        environment={"GIT_DIR": str(store.path), "GIT_INDEX_FILE": str(scratch / "honest.index")},
    )  # fmt: skip
    return store.git("write-tree").decode().strip()
