import pytest

from leafthrough import PageError, Paginator


def test_pages_of_a_full_listing():
    p = Paginator(list(range(20)), per_page=10)
    assert p.page_count == 2
    assert list(p.page(1)) == list(range(10))
    assert list(p.page(2)) == list(range(10, 20))


def test_an_empty_listing_has_one_empty_page():
    p = Paginator([], per_page=10)
    assert p.page_count == 1
    page = p.page(1)
    assert len(page) == 0
    assert (page.first_index, page.last_index) == (0, 0)


def test_neighbours():
    p = Paginator(list(range(20)), per_page=10)
    assert not p.page(1).has_previous
    assert p.page(1).has_next
    assert p.page(2).has_previous
    assert not p.page(2).has_next


@pytest.mark.parametrize("number", [0, -1, 3])
def test_a_page_out_of_range(number):
    with pytest.raises(PageError):
        Paginator(list(range(20)), per_page=10).page(number)


def test_per_page_must_be_positive():
    with pytest.raises(ValueError):
        Paginator([1], per_page=0)
