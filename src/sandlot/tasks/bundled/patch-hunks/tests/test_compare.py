from hunkwork.compare import Change, changes


def test_no_change():
    assert changes(list("abc"), list("abc")) == []


def test_one_line():
    assert changes(list("abc"), list("aBc")) == [Change(1, 2, 1, 2)]


def test_insert_and_delete():
    assert changes(list("abcd"), list("abXcd")) == [Change(2, 2, 2, 3)]
    assert changes(list("abcd"), list("acd")) == [Change(1, 2, 1, 1)]


def test_two_changes():
    assert changes(list("abcde"), list("AbcdE")) == [Change(0, 1, 0, 1), Change(4, 5, 4, 5)]
