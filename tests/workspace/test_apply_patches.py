"""Patches from elsewhere: whole or not at all, forward only."""

from pathlib import Path

import pytest

from sandlot.tasks import Repository
from sandlot.workspace.apply import apply_to_tree, without_stubs
from sandlot.workspace.git import GitError, Store
from support.repositories import prepared, repository, stream

LINES = "".join(f"line {n}\n" for n in range(1, 20))
FITS = b"""\
diff --git a/a.txt b/a.txt
--- a/a.txt
+++ b/a.txt
@@ -1,3 +1,3 @@
 line 1
-line 2
+LINE 2
 line 3
"""
DRIFTED = b"""\
diff --git a/b.txt b/b.txt
--- a/b.txt
+++ b/b.txt
@@ -7,7 +7,7 @@
 other 7
 other 8
 other 9
-line 10
+LINE 10
 line 11
 line 12
 line 13
"""
STUB = b"""\
diff --git a/out.bin b/out.bin
new file mode 100644
index 0000000..d95f3ad
Binary files /dev/null and b/out.bin differ
"""


@pytest.fixture
def store(tmp_path: Path) -> tuple[Store, str, Path]:
    origin = repository(tmp_path / "origin", {"a.txt": LINES, "b.txt": LINES})
    base = prepared(Repository(fast_export=stream(origin, tmp_path / "repo.fi"), base="base"))
    return Store.create(tmp_path / "store", alternate=base.store), base.base_tree, tmp_path / "index"


def test_a_fitting_patch_applies(store: tuple[Store, str, Path]) -> None:
    made, tree, index = store
    entries = made.entries(apply_to_tree(made, tree, FITS, index))
    (content,) = made.blobs([entries[b"a.txt"].blob])
    assert content == LINES.replace("line 2\n", "LINE 2\n").encode()


@pytest.mark.parametrize("patch", [FITS + DRIFTED, DRIFTED + FITS, DRIFTED], ids=["after", "before", "alone"])
def test_one_part_that_does_not_fit_refuses_all(store: tuple[Store, str, Path], patch: bytes) -> None:
    made, tree, index = store
    with pytest.raises(GitError, match=r"b\.txt"):
        apply_to_tree(made, tree, patch, index)
    assert made.with_index(index).git("write-tree").decode().strip() == tree


def test_it_is_never_applied_backwards(store: tuple[Store, str, Path]) -> None:
    made, tree, index = store
    once = apply_to_tree(made, tree, FITS, index)
    with pytest.raises(GitError):
        apply_to_tree(made, once, FITS, index)


@pytest.mark.parametrize("junk", [b"not a patch\n", b"diff --git a/a.txt b/a.txt\n@@ -1 +1 @@\n", FITS[:-8]])
def test_junk_is_refused(store: tuple[Store, str, Path], junk: bytes) -> None:
    made, tree, index = store
    with pytest.raises(GitError):
        apply_to_tree(made, tree, junk, index)


@pytest.mark.parametrize("path", ["../out.txt", "/etc/out.txt", ".git/hooks/x", "a/../../out"])
def test_a_patch_cannot_leave_the_tree(store: tuple[Store, str, Path], path: str) -> None:
    made, tree, index = store
    patch = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(GitError):
        apply_to_tree(made, tree, patch.encode(), index)


def test_the_text_of_a_foreign_patch_with_a_binary_stub_applies(store: tuple[Store, str, Path]) -> None:
    made, tree, index = store
    with pytest.raises(GitError):
        apply_to_tree(made, tree, STUB + FITS, index)
    kept, skipped = without_stubs(STUB + FITS + STUB.replace(b"out", b"two"))
    assert kept == FITS
    assert skipped == ("/dev/null and b/out.bin", "/dev/null and b/two.bin")
    assert apply_to_tree(made, tree, kept, index) != tree


def test_a_text_that_speaks_of_binary_files_is_no_stub() -> None:
    patch = FITS.replace(b"+LINE 2", b"+Binary files a and b differ")
    assert without_stubs(patch) == (patch, ())


def test_an_empty_patch_changes_nothing(store: tuple[Store, str, Path]) -> None:
    made, tree, index = store
    assert apply_to_tree(made, tree, b"", index) == tree
    assert apply_to_tree(made, tree, b"\n \n", index) == tree
