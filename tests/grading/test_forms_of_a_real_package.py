"""One real fix told in the other forms: SWE-bench Pro, R2E-Gym and SWE-smith rows of it hold under `tasks check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandlot.grading.check import check_task
from sandlot.sandbox import SandboxBackend
from sandlot.tasks import load_tasks
from support.real_fix import Fix, pro, r2e, real_fix, smith
from support.repositories import stream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.mark.parametrize("form", [pro, r2e, smith])
async def test_the_form_holds(backend: SandboxBackend, tmp_path: Path, form: Callable[[Fix], dict[str, Any]]) -> None:
    fix = real_fix(tmp_path / "work")
    stream(fix.work, tmp_path / "repo.fi", "main")
    base = fix.future if form is smith else fix.base
    row = {**form(fix), "repository": {"fast_export": "repo.fi", "base": base}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = load_tasks(tmp_path / "rows.jsonl")
    checked = await check_task(task, backend, cheats=False)
    assert checked.faults == ()
    assert (checked.gold, checked.empty) == (1.0, 0.0)
