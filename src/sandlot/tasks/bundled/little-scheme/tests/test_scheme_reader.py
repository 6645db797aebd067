import pytest

from parens.errors import SchemeError
from parens.reader import QUOTE, Symbol, read


def test_expressions():
    assert read("(a 1 2.5) ; note\n'b #t") == [[Symbol("a"), 1, 2.5], [QUOTE, Symbol("b")], True]


def test_strings_are_no_symbols():
    (text,) = read(r'"a \"b\""')
    assert text == 'a "b"'
    assert not isinstance(text, Symbol)


@pytest.mark.parametrize("text", ["(", ")", "(a))", "'", '"open'], ids=range(5))
def test_unreadable(text):
    with pytest.raises(SchemeError):
        read(text)
