import pytest

from leafthrough import PageError, Paginator, page_links


def test_the_shorter_last_page_counts():
    p = Paginator(list(range(25)), per_page=10)
    assert p.page_count == 3
    assert list(p.page(3)) == [20, 21, 22, 23, 24]


def test_one_item_more_than_a_full_page():
    p = Paginator("abcd", per_page=3)
    assert [list(page) for page in p] == [["a", "b", "c"], ["d"]]


def test_indices_of_the_last_page():
    page = Paginator(list(range(25)), per_page=10).page(3)
    assert (page.first_index, page.last_index) == (21, 25)
    assert not page.has_next


def test_links_reach_the_last_page():
    assert page_links(Paginator(list(range(91)), per_page=10), 1)[-1] == 10


def test_nothing_behind_the_last_page():
    p = Paginator(list(range(20)), per_page=10)
    assert p.page_count == 2
    with pytest.raises(PageError):
        p.page(3)


def test_fewer_items_than_a_page():
    p = Paginator([1, 2], per_page=10)
    assert p.page_count == 1
    assert list(p.page(1)) == [1, 2]
