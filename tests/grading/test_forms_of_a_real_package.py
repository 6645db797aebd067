"""One real fix told in the other forms: SWE-bench Pro, R2E-Gym and SWE-smith rows of it hold under `tasks check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandlot.cli.app import app
from sandlot.tasks import PytestGrading, R2EGrading, SweProGrading, load_tasks
from support.real_fix import pro, r2e, real_fix, smith
from support.repositories import stream

pytestmark = pytest.mark.slow


def test_rows_of_all_three_forms_hold(tmp_path: Path) -> None:
    fix = real_fix(tmp_path / "work")
    stream(fix.work, tmp_path / "repo.fi", "main")
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as lines:
        for form in (pro, r2e, smith):
            base = fix.future if form is smith else fix.base
            lines.write(json.dumps({**form(fix), "repository": {"fast_export": "repo.fi", "base": base}}) + "\n")
    done = CliRunner().invoke(app, ["tasks", "check", str(rows), "--no-cheats", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(row["ok"], row["gold"], row["again"], row["empty"], row["faults"]) for row in told] == [
        (True, 1.0, 1.0, 0.0, [])
    ] * 3
    assert {type(task.grading) for task in load_tasks(rows)} == {SweProGrading, R2EGrading, PytestGrading}
