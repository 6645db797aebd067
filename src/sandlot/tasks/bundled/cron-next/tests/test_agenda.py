from datetime import datetime

from cronlet.agenda import agenda


def test_one_run_of_each():
    lines = ["0 12 * * *", "0 6 * * *"]
    assert agenda(lines, datetime(2024, 3, 18), 1) == [(datetime(2024, 3, 18, 6), "0 6 * * *")]


def test_no_lines():
    assert agenda([], datetime(2024, 3, 18), 3) == []
