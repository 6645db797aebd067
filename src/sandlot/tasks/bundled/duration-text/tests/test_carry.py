import pytest

from spantime import format_duration, parse_duration


def test_seconds_carry():
    assert format_duration(59.7) == "1m"
    assert format_duration(119.5) == "2m"


def test_minutes_carry():
    assert format_duration(3599.6) == "1h"


def test_hours_carry():
    assert format_duration(86399.9) == "1d"
    assert format_duration(2 * 86400 - 0.2) == "2d"


def test_carry_with_precision():
    assert format_duration(7199.99, precision=1) == "2h"
    assert format_duration(59.996, precision=2) == "1m"
    assert format_duration(59.94, precision=1) == "59.9s"


def test_negative_durations_carry():
    assert format_duration(-59.7) == "-1m"


def test_nothing_has_no_sign():
    assert format_duration(-0.2) == "0s"


def test_rounding_below_a_unit():
    assert format_duration(60.2) == "1m"


def test_fractions_stay():
    assert format_duration(61.26, precision=1) == "1m1.3s"
    assert format_duration(3600.25, precision=2) == "1h0.25s"


@pytest.mark.parametrize("precision", [0, 1, 2])
def test_reads_back(precision):
    step = 10**-precision
    for n in range(0, 200000, 777):
        seconds = n * 0.9173
        text = format_duration(seconds, precision=precision)
        assert "60" not in text.replace("h60", "").split("m")[-1].split(".")[0]
        assert abs(parse_duration(text) - seconds) <= step * 0.5001
