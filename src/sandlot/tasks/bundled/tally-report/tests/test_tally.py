import pytest

from tally.__main__ import main


@pytest.fixture
def sales(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sales.csv").write_text("who,amount\nann,2\nbob,3\nann,2\n")
    return "sales.csv"


def test_count(sales, capsys):
    assert main([sales, "--by", "who"]) == 0
    assert capsys.readouterr().out == "who  count\nann  2\nbob  1\n"


def test_sum(sales, capsys):
    assert main([sales, "--by", "who", "--sum", "amount"]) == 0
    assert capsys.readouterr().out == "who  amount\nann  4\nbob  3\n"


def test_no_such_column(sales, capsys):
    assert main([sales, "--by", "when"]) == 2
    assert "no column 'when'" in capsys.readouterr().err


def test_no_such_file(capsys):
    assert main(["absent.csv", "--by", "who"]) == 2
    assert "absent.csv" in capsys.readouterr().err
