import pytest

from inkwell import IniError, loads


def test_sections_and_keys():
    text = "top = 1\n[a]\nx = one\ny=two words\n\n[b]\nx =\n"
    assert loads(text) == {"": {"top": "1"}, "a": {"x": "one", "y": "two words"}, "b": {"x": ""}}


def test_comments():
    assert loads("# first\n[a] ; the section\nx = 1 ; one\n; last\n") == {"a": {"x": "1"}}


def test_continued_value():
    assert loads("[a]\nx = one\n  two\n\tthree\ny = 1\n") == {"a": {"x": "one\ntwo\nthree", "y": "1"}}


def test_quotes_and_escapes():
    assert loads("[a]\nx = \" padded \"\ny = 'tab\\there'\n") == {"a": {"x": " padded ", "y": "tab\there"}}


def test_same_section_twice():
    assert loads("[a]\nx = 1\n[b]\n[a]\ny = 2\n") == {"a": {"x": "1", "y": "2"}, "b": {}}


@pytest.mark.parametrize(
    ("text", "line"),
    [("[a\n", 1), ("[a]\nnonsense\n", 2), ("[a]\n = 1\n", 2), ("  x\n", 1), ("\n\nx = '\\q'\n", 3)],
    ids=["open-section", "no-equals", "no-key", "nothing-to-continue", "bad-escape"],
)
def test_errors_name_the_line(text, line):
    with pytest.raises(IniError) as caught:
        loads(text)
    assert caught.value.line == line
