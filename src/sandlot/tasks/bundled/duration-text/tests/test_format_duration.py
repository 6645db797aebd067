import pytest

from spantime import format_duration, parse_duration


def test_whole_units():
    assert format_duration(0) == "0s"
    assert format_duration(45) == "45s"
    assert format_duration(5400) == "1h30m"
    assert format_duration(86400 + 1) == "1d1s"
    assert format_duration(-90) == "-1m30s"


def test_fractions():
    assert format_duration(61.26, precision=1) == "1m1.3s"
    assert format_duration(0.25, precision=2) == "0.25s"


def test_precision_cannot_be_negative():
    with pytest.raises(ValueError):
        format_duration(1, precision=-1)


def test_reads_what_it_writes():
    for seconds in (0, 1, 59, 60, 3599, 3600, 86399, 123456):
        assert parse_duration(format_duration(seconds)) == seconds
