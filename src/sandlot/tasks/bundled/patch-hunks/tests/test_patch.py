import pytest

from hunkwork import PatchError, apply, diff


def test_round_trip():
    old = "".join(f"{n}\n" for n in range(40))
    new = old.replace("5\n", "five\n", 1).replace("30\n", "")
    assert apply(old, diff(old, new)) == new


def test_does_not_fit():
    with pytest.raises(PatchError, match="hunk 1"):
        apply("x\ny\nz\n", diff("a\nb\nc\n", "a\nB\nc\n"))


def test_no_patch():
    with pytest.raises(PatchError, match="line 1"):
        apply("a\n", "hello\n")
