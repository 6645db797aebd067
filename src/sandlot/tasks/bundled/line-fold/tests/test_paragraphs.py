from foldline import fold_paragraphs


def test_paragraphs_stay_apart():
    assert fold_paragraphs("one two\nthree\n\n\n  four\n", width=8) == "one two\nthree\n\nfour"


def test_no_text():
    assert fold_paragraphs("\n\n") == ""
