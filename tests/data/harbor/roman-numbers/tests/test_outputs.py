import pytest
from roman import value


@pytest.mark.parametrize(("text", "number"), [("IV", 4), ("xc", 90), ("MCMXCIV", 1994), ("III", 3), ("", 0)])
def test_values(text, number):
    assert value(text) == number


def test_other_letters():
    with pytest.raises(ValueError):
        value("IQ")
