from hunkwork import diff


def test_nothing_changed():
    assert diff("a\nb\n", "a\nb\n") == ""


def test_a_changed_line():
    assert diff("a\nb\nc\n", "a\nB\nc\n") == "@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"


def test_context():
    old = "".join(f"{n}\n" for n in range(1, 10))
    assert diff(old, old.replace("5", "five"), context=2) == "@@ -3,5 +3,5 @@\n 3\n 4\n-5\n+five\n 6\n 7\n"
