import random

import pytest

from foldline import bullets, fold, fold_lines, fold_paragraphs


def test_hanging_indent_counts():
    lines = fold_lines("one two three four five", width=12, hanging="    ")
    assert lines == ["one two", "    three", "    four", "    five"]


def test_hanging_indent_smaller_than_the_first():
    lines = fold_lines("aa bb cc dd ee", width=8, indent="....", hanging=".")
    assert lines == ["....aa", ".bb cc", ".dd ee"]


def test_bullets_fit():
    text = bullets(["alpha beta gamma", "delta"], width=10, mark=" - ")
    assert text.split("\n") == [" - alpha", "   beta", "   gamma", " - delta"]


def test_long_word_starts_on_the_line_above():
    assert fold_lines("ab cdefghij", width=5) == ["ab cd", "efghi", "j"]


def test_long_word_without_room_above():
    assert fold_lines("abcd efghijk", width=5) == ["abcd", "efghi", "jk"]


def test_last_piece_is_followed_by_the_next_word():
    assert fold_lines("abcdefg hi", width=5) == ["abcde", "fg hi"]


def test_long_word_alone():
    assert fold_lines("abcdefghij", width=4, indent="> ", hanging="| ") == ["> ab", "| cd", "| ef", "| gh", "| ij"]


def test_word_that_fits_the_next_line_is_not_broken():
    assert fold_lines("abc defgh", width=5) == ["abc", "defgh"]


@pytest.mark.parametrize(("indent", "hanging"), [("12345", ""), ("", "12345"), ("1234567", "")])
def test_indent_without_room(indent, hanging):
    with pytest.raises(ValueError):
        fold("one two three", width=5, indent=indent, hanging=hanging)


def test_paragraphs_fit():
    text = fold_paragraphs("aaa bbb ccc\n\ndddddddd", width=6, hanging="  ")
    assert text == "aaa\n  bbb\n  ccc\n\ndddddd\n  dd"


def test_no_line_is_too_wide():
    rng = random.Random(3)
    for _ in range(300):
        words = ["x" * rng.randint(1, 12) for _ in range(rng.randint(0, 12))]
        width = rng.randint(4, 15)
        indent, hanging = " " * rng.randint(0, 3), " " * rng.randint(0, 3)
        lines = fold_lines(" ".join(words), width, indent, hanging)
        assert all(len(line) <= width for line in lines)
        assert "".join("".join(lines).split()) == "".join(words)
        assert all(line.strip() for line in lines)
