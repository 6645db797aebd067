"""`sandlot tasks`: check, its filtered output, and convert."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sandlot.cli.tasks import group
from sandlot.tasks import load_tasks


def test_the_command_writes_what_holds(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out" / "good.jsonl"
    made = CliRunner().invoke(group, ["convert", "bundled", str(source)])
    assert made.exit_code == 0, made.output
    rows = [json.loads(line) for line in source.read_text().splitlines() if '"label": "page-count"' in line]
    bad = json.loads(json.dumps(rows[0]).replace("page-count", "hollow"))
    bad["metadata"]["grading"] = {"form": "command", "command": "true"}
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, bad, {"prompt": "p", "metadata": {}}]))
    done = CliRunner().invoke(group, ["check", str(source), "--no-cheats", "--json", "--jobs", "2", "--out", str(out)])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [(row["task"], row["ok"]) for row in told] == [("page-count", True), ("hollow", False), (None, False)]
    assert "row 3: metadata.image" in told[2]["faults"][0]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"source": "../rows.jsonl", "id": "page-count"}
    ]
    assert [task.id for task in load_tasks(out)] == ["page-count"]


def test_an_unknown_task_and_a_wrong_ending_are_refused(tmp_path: Path) -> None:
    nobody = CliRunner().invoke(group, ["check", "bundled", "--only", "nobody"])
    assert "there is no task called 'nobody' in bundled" in str(nobody.exception)
    wrong = CliRunner().invoke(group, ["convert", "bundled", str(tmp_path / "x.csv")])
    assert "rows are written to a .jsonl file" in str(wrong.exception)
