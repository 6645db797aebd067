from datetime import datetime

import pytest

from cronlet import CronError, next_run


def test_later_the_same_day():
    assert next_run("30 8,20 * * *", datetime(2024, 3, 18, 9, 0)) == datetime(2024, 3, 18, 20, 30)


def test_next_day():
    assert next_run("30 8 * * *", datetime(2024, 3, 18, 9, 0)) == datetime(2024, 3, 19, 8, 30)


def test_working_days():
    assert next_run("0 9 * * mon-fri", datetime(2024, 3, 15, 10, 0)) == datetime(2024, 3, 18, 9, 0)


def test_every_quarter_of_an_hour():
    assert next_run("*/15 * * * *", datetime(2024, 3, 18, 9, 20)) == datetime(2024, 3, 18, 9, 30)


def test_number_of_fields():
    with pytest.raises(CronError, match="5 fields"):
        next_run("* * * *", datetime(2024, 1, 1))
