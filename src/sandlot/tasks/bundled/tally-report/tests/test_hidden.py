import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SALES = "who,amount\nann,9\nbob,100\ncem,n/a\nann,1.5\n"


def tally(tmp_path, text, *options):
    (tmp_path / "sales.csv").write_text(text)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tally.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "sales.csv", "--by", "who", *options], cwd=tmp_path, capture_output=True, text=True
    )


def test_sums_are_ranked_as_numbers(tmp_path):
    done = tally(tmp_path, SALES, "--sum", "amount")
    assert done.stdout == "who  amount\nbob  100\nann  10.5\n"


def test_bad_rows_are_reported(tmp_path):
    done = tally(tmp_path, SALES, "--sum", "amount")
    assert done.stderr == "tally: sales.csv: row 3: 'n/a' is not a number\n"
    assert done.returncode == 1


def test_every_bad_row(tmp_path):
    done = tally(tmp_path, "who,amount\na,\na,nan\na,inf\na, 2 \n", "--sum", "amount")
    assert done.stdout == "who  amount\na    2\n"
    assert [line.split(": ")[2] for line in done.stderr.splitlines()] == ["row 1", "row 2", "row 3"]
    assert done.returncode == 1


def test_good_rows_exit_with_0(tmp_path):
    done = tally(tmp_path, "who,amount\na,-3\nb,-20\nc,4\n", "--sum", "amount")
    assert done.stdout == "who  amount\nc    4\na    -3\nb    -20\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_names_break_ties(tmp_path):
    done = tally(tmp_path, "who,amount\nz,5\nb,5\nm,5\n", "--sum", "amount")
    assert done.stdout.split()[2::2] == ["b", "m", "z"]


def test_top_takes_the_largest(tmp_path):
    done = tally(tmp_path, "who,amount\na,1\nb,30\nc,4\n", "--sum", "amount", "--top", "2")
    assert done.stdout == "who  amount\nb    30\nc    4\n"


def test_counts_are_ranked_as_numbers(tmp_path):
    done = tally(tmp_path, "who,amount\n" + "a,x\n" * 9 + "b,x\n" * 10 + "c,x\n")
    assert done.stdout == "who  count\nb    10\na    9\nc    1\n"
    assert done.returncode == 0
