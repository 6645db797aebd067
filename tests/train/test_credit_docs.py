"""The table in the documentation of credit is what the code gives."""

from pathlib import Path

from support.credit_table import table

PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "credit.md"


def test_the_table_is_what_the_code_gives() -> None:
    assert table() in PAGE.read_text()
