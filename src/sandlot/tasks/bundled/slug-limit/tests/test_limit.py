import pytest

from slugline import slugify, unique_slug


def test_cut_behind_a_word():
    assert slugify("Hello brave new world", max_length=6) == "hello"


def test_cut_exactly_at_a_word_end():
    assert slugify("Hello brave new world", max_length=5) == "hello"


def test_cut_behind_a_long_separator():
    assert slugify("one two", separator="--", max_length=5) == "one"


def test_cut_inside_a_long_separator():
    assert slugify("one two", separator="--", max_length=4) == "one"


def test_cut_inside_a_mixed_separator():
    assert slugify("one two", separator="-_", max_length=4) == "one"


def test_no_doubled_dash_before_the_counter():
    name = unique_slug("Hello brave world", taken={"hello-br"}, max_length=8)
    assert name == "hello-2"


@pytest.mark.parametrize("limit", range(1, 25))
def test_every_limit(limit):
    slug = slugify("a bb ccc dddd eeeee", max_length=limit)
    assert len(slug) <= limit
    assert not slug.endswith("-")
    assert "a-bb-ccc-dddd-eeeee".startswith(slug)
