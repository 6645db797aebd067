from slugline import unique_slug


def test_a_free_name_stays():
    assert unique_slug("News", taken=set()) == "news"


def test_counts_up():
    assert unique_slug("News", taken={"news", "news-2"}) == "news-3"


def test_the_counter_fits_the_limit():
    assert unique_slug("Newspaper", taken={"newsp"}, max_length=5) == "new-2"
