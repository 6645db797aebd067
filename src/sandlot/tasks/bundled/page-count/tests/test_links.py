from leafthrough import GAP, Paginator, page_links


def test_short_listing_shows_every_page():
    assert page_links(Paginator(list(range(30)), per_page=10), 2) == [1, 2, 3]


def test_long_listing_has_gaps():
    assert page_links(Paginator(list(range(100)), per_page=10), 5) == [1, GAP, 4, 5, 6, GAP, 10]
