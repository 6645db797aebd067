import pytest

from slugline import slugify


def test_titles():
    assert slugify("Hello World") == "hello-world"
    assert slugify("  spaced   out  ") == "spaced-out"
    assert slugify("Don't panic") == "dont-panic"
    assert slugify("Crème brûlée, twice!") == "creme-brulee-twice"
    assert slugify("Salt & pepper") == "salt-and-pepper"
    assert slugify("...") == ""


def test_another_separator():
    assert slugify("one two", separator="_") == "one_two"


def test_cut_inside_a_word():
    assert slugify("Hello World", max_length=8) == "hello-wo"


def test_max_length_must_be_positive():
    with pytest.raises(ValueError):
        slugify("x", max_length=0)
