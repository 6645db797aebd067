import time
from datetime import datetime, timedelta

import pytest

from cronlet import CronError, next_run
from cronlet.agenda import agenda


def runs(line, after, count):
    found = []
    for _ in range(count):
        after = next_run(line, after)
        found.append(after)
    return found


def days(line, after, count):
    return [moment.date().isoformat() for moment in runs(line, after, count)]


def test_first_of_the_next_month():
    assert next_run("0 9 1 * *", datetime(2024, 1, 31, 10)) == datetime(2024, 2, 1, 9)


def test_every_day_over_month_ends():
    found = days("0 0 * * *", datetime(2023, 12, 30, 12), 70)
    assert found[:3] == ["2023-12-31", "2024-01-01", "2024-01-02"]
    assert "2024-02-29" in found
    assert len(set(found)) == 70


def test_the_31st():
    assert days("0 0 31 * *", datetime(2024, 1, 31), 3) == ["2024-03-31", "2024-05-31", "2024-07-31"]


def test_leap_day():
    assert next_run("0 0 29 2 *", datetime(2024, 3, 1)) == datetime(2028, 2, 29)


def test_leap_day_over_1900():
    assert next_run("0 0 29 2 *", datetime(1896, 2, 29)) == datetime(1904, 2, 29)


@pytest.mark.parametrize("line", ["0 0 31 4 *", "0 0 30 2 *", "0 0 31 2,4,6,9,11 *"], ids=range(3))
def test_a_day_that_never_comes(line):
    started = time.monotonic()
    with pytest.raises(CronError):
        next_run(line, datetime(2024, 1, 1))
    assert time.monotonic() - started < 2


def test_both_day_fields():
    assert days("0 12 13 * 5", datetime(2024, 9, 7), 4) == ["2024-09-13", "2024-09-20", "2024-09-27", "2024-10-04"]
    assert days("0 12 13 * 5", datetime(2024, 10, 12), 2) == ["2024-10-13", "2024-10-18"]


def test_both_day_fields_keep_the_month():
    assert next_run("0 0 1 6 mon", datetime(2024, 1, 1)) == datetime(2024, 6, 1)


def test_a_star_with_a_step_does_not_restrict():
    assert days("0 0 */10 * 1", datetime(2024, 1, 1), 2) == ["2024-03-11", "2024-04-01"]


def test_one_day_field_alone():
    assert days("0 0 * * 2", datetime(2024, 1, 1), 2) == ["2024-01-02", "2024-01-09"]
    assert days("0 0 5 * *", datetime(2024, 1, 1), 2) == ["2024-01-05", "2024-02-05"]


def test_seven_is_sunday():
    assert days("0 0 * * 7", datetime(2024, 1, 1), 2) == ["2024-01-07", "2024-01-14"]
    assert days("0 0 * * 5-7", datetime(2024, 1, 1), 4) == ["2024-01-05", "2024-01-06", "2024-01-07", "2024-01-12"]


def test_every_other_weekday():
    assert days("0 0 * * */2", datetime(2024, 1, 1), 4) == ["2024-01-02", "2024-01-04", "2024-01-06", "2024-01-07"]


def test_always_later():
    due = datetime(2024, 3, 18, 8, 30)
    assert next_run("30 8 * * *", due) == due + timedelta(days=1)
    assert next_run("30 8 * * *", due - timedelta(seconds=1)) == due
    assert next_run("30 8 * * *", due + timedelta(microseconds=1)) == due + timedelta(days=1)


def test_seconds_are_zero():
    assert next_run("* * * * *", datetime(2024, 3, 18, 8, 30, 15, 99)) == datetime(2024, 3, 18, 8, 31)


def test_agenda_goes_on():
    lines = ["0 12 * * *", "0 6,18 * * *"]
    found = [moment.hour for moment, _ in agenda(lines, datetime(2024, 12, 31), 6)]
    assert found == [6, 12, 18, 6, 12, 18]
