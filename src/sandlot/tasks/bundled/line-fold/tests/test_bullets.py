from foldline import bullets


def test_items():
    assert bullets(["a b", "c"], width=10) == "* a b\n* c"
