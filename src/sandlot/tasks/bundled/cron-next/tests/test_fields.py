import pytest

from cronlet.fields import KINDS, CronError, parse_field

MINUTE, HOUR, DAY, MONTH, WEEKDAY = KINDS


def test_forms():
    assert parse_field("5", MINUTE) == {5}
    assert parse_field("1-3,7", HOUR) == {1, 2, 3, 7}
    assert parse_field("*/20", MINUTE) == {0, 20, 40}
    assert parse_field("10-20/5", DAY) == {10, 15, 20}
    assert parse_field("jan,MAR", MONTH) == {1, 3}
    assert parse_field("mon-fri", WEEKDAY) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("text", ["60", "x", "5-1", "*/0", "", "1-"], ids=range(6))
def test_bad_fields(text):
    with pytest.raises(CronError, match="minute"):
        parse_field(text, MINUTE)
