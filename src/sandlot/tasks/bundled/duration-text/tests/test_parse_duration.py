import pytest

from spantime import DurationError, parse_duration


def test_units():
    assert parse_duration("1h30m") == 5400
    assert parse_duration("2d 4h") == 2 * 86400 + 4 * 3600
    assert parse_duration(" 1.5h ") == 5400
    assert parse_duration("-90s") == -90


@pytest.mark.parametrize("text", ["", "-", "h", "5", "1m1h", "3s3s", "1 fortnight"], ids=range(7))
def test_no_duration(text):
    with pytest.raises(DurationError):
        parse_duration(text)
