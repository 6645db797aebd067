import pytest

from foldline import fold, fold_lines


def test_short_text_is_one_line():
    assert fold("one  two\nthree", width=20) == "one two three"


def test_breaks_at_words():
    assert fold_lines("one two three four", width=9) == ["one two", "three", "four"]


def test_exact_fit():
    assert fold_lines("abc def ghi", width=7) == ["abc def", "ghi"]


def test_first_indent_counts():
    assert fold_lines("one two three", width=9, indent="> ") == ["> one two", "three"]


def test_no_words():
    assert fold_lines("  \n ") == []


def test_width_must_be_positive():
    with pytest.raises(ValueError):
        fold("x", width=0)
