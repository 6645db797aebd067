import random

import pytest

from hunkwork import PatchError, apply, diff


def numbered(count, **changed):
    return "".join("{}\n".format(changed.get(f"n{n}", n)) for n in range(1, count + 1))


def headers(patch):
    return [line for line in patch.split("\n") if line.startswith("@@")]


def test_close_changes_share_a_hunk():
    patch = diff(numbered(20), numbered(20, n5="five", n12="twelve"))
    assert headers(patch) == ["@@ -2,14 +2,14 @@"]
    assert patch.count("\n 8\n") == 1


def test_changes_seven_lines_apart_do_not():
    patch = diff(numbered(20), numbered(20, n5="five", n13="thirteen"))
    assert headers(patch) == ["@@ -2,7 +2,7 @@", "@@ -10,7 +10,7 @@"]


def test_three_close_changes():
    old, new = numbered(20), numbered(20, n4="a", n8="b", n12="c")
    assert len(headers(diff(old, new))) == 1
    assert apply(old, diff(old, new)) == new


def test_without_context():
    patch = diff(numbered(9), numbered(9, n3="x", n5="y"), context=0)
    assert patch == "@@ -3 +3 @@\n-3\n+x\n@@ -5 +5 @@\n-5\n+y\n"


def test_from_an_empty_text():
    patch = diff("", "a\nb\n")
    assert patch == "@@ -0,0 +1,2 @@\n+a\n+b\n"
    assert apply("", patch) == "a\nb\n"


def test_to_an_empty_text():
    patch = diff("a\nb\n", "")
    assert patch == "@@ -1,2 +0,0 @@\n-a\n-b\n"
    assert apply("a\nb\n", patch) == ""


def test_insertion_without_context():
    old, new = numbered(9), numbered(9, n4="4\nnew")
    patch = diff(old, new, context=0)
    assert patch == "@@ -4,0 +5 @@\n+new\n"
    assert apply(old, patch) == new


def test_deletion_without_context():
    old = numbered(9)
    patch = diff(old, old.replace("4\n5\n", ""), context=0)
    assert patch == "@@ -4,2 +3,0 @@\n-4\n-5\n"
    assert apply(old, patch) == old.replace("4\n5\n", "")


def test_newline_is_lost():
    patch = diff("a\nb\n", "a\nb")
    assert patch == "@@ -1,2 +1,2 @@\n a\n-b\n+b\n\\ No newline at end of file\n"
    assert apply("a\nb\n", patch) == "a\nb"


def test_newline_is_added():
    patch = diff("a\nb", "a\nb\nc\n")
    assert patch == "@@ -1,2 +1,3 @@\n a\n-b\n\\ No newline at end of file\n+b\n+c\n"
    assert apply("a\nb", patch) == "a\nb\nc\n"


def test_no_newline_in_the_context():
    patch = diff("a\nb", "A\nb")
    assert patch == "@@ -1,2 +1,2 @@\n-a\n+A\n b\n\\ No newline at end of file\n"
    assert apply("a\nb", patch) == "A\nb"


def test_moved_down_and_up():
    patch = diff("a\nb\nc\n", "a\nB\nc\n")
    assert apply("x\na\nb\nc\n", patch) == "x\na\nB\nc\n"
    patch = diff(numbered(20), numbered(20, n15="x"))
    assert apply(numbered(20).replace("1\n2\n3\n", "", 1), patch) == numbered(20, n15="x").replace("1\n2\n3\n", "", 1)


def test_nearest_place_wins():
    block = "a\nb\nc\n"
    patch = diff("1\n2\n3\n4\n" + block, "1\n2\n3\n4\na\nB\nc\n", context=1)
    text = block + "-\n-\n-\n" + block + "-\n"
    assert apply(text, patch) == block + "-\n-\n-\na\nB\nc\n-\n"


def test_the_earlier_of_two_equally_near():
    patch = "@@ -3 +3 @@\n-x\n+y\n"
    assert apply("a\nx\nb\nx\nc\n", patch) == "a\ny\nb\nx\nc\n"


def test_later_hunks_follow_the_ones_before():
    patch = "@@ -1 +1 @@\n-a\n+A\n@@ -3 +3 @@\n-x\n+y\n"
    text = "0\n0\n0\na\nx\nx\n0\n"
    assert apply(text, patch) == "0\n0\n0\nA\nx\ny\n0\n"


def test_hunks_stay_in_order():
    patch = "@@ -1 +1 @@\n-a\n+A\n@@ -2 +2 @@\n-b\n+B\n"
    with pytest.raises(PatchError, match="hunk 2"):
        apply("b\na\nc\n", patch)


def test_a_hunk_does_not_reach_into_the_one_before():
    patch = "@@ -1,2 +1,2 @@\n-a\n-b\n+a\n+a\n@@ -3,2 +3,2 @@\n-a\n-c\n+x\n+c\n"
    with pytest.raises(PatchError, match="hunk 2"):
        apply("a\nb\nc\n", patch)


def test_round_trips():
    rng = random.Random(5)
    for _ in range(300):
        old = "".join(rng.choice("abc") + "\n" for _ in range(rng.randint(0, 25)))
        lines = old.splitlines(keepends=True)
        for _ in range(rng.randint(0, 4)):
            at = rng.randint(0, len(lines))
            lines[at : at + rng.randint(0, 2)] = [rng.choice("abcd") + "\n" for _ in range(rng.randint(0, 2))]
        new = "".join(lines)
        if rng.random() < 0.3:
            new = new[:-1]
        if rng.random() < 0.3:
            old = old[:-1]
        for context in (0, 1, 3):
            assert apply(old, diff(old, new, context)) == new
