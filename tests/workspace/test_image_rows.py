"""Rows that name an image, from end to end: prepared in it, worked on, captured, and graded in a fresh one."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sandlot.grading import grade
from sandlot.grading.runtime import test_runtime_layer as pytest_layer
from sandlot.sandbox import SandboxBackend, SandboxSpec
from sandlot.tasks import Task, load_tasks
from sandlot.tasks.swe import TESTBED_PYTHON
from sandlot.workspace import capture, prepare
from support.image_files import make_image, write_layout
from support.machine_image import environment, machine_layer
from support.real_fix import TEST, Fix, pro, r2e, real_fix, smith, swe
from support.repositories import git

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
FORMS = {"swe": swe, "pro": pro, "r2e": r2e, "smith": smith}
WORK = """
git log --all --oneline | grep 'The fix' && exit 1
git cat-file -e $FUTURE 2>/dev/null && exit 1
git checkout -q -b mine && git apply /tmp/solution.patch && git add -A && git commit -qm 'Done' && rm -rf .git/objects
mkdir -p build __pycache__ && echo x > __pycache__/x.pyc
"""


@pytest.fixture(scope="module")
def fix(tmp_path_factory: pytest.TempPathFactory) -> Fix:
    made = real_fix(tmp_path_factory.mktemp("fix") / "work")
    git(made.work, "remote", "add", "origin", "https://example.invalid/parse")
    git(made.work, "update-ref", "refs/remotes/origin/main", made.future)
    return made


@pytest.fixture(scope="module")
def image(fix: Fix, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An OCI layout as the images of the data sets are: `/testbed` (Pro: `/app`) with the future in its history, the
    environments that tests run in, and R2E-Gym's tests."""
    git(fix.work, "checkout", "-q", "--detach", fix.base)
    buffer = io.BytesIO()
    packages = pytest_layer().source / "lib"
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for place in ("testbed", "app"):
            tar.add(fix.work, arcname=place)
        for place in ("testbed/.venv", str(Path(TESTBED_PYTHON).parents[1])[1:], "opt/venv"):
            environment(tar, place, packages)
        test = git(fix.work, "show", f"{fix.future}:{TEST}").encode()
        info = tarfile.TarInfo("r2e_tests/test_1.py")
        info.size = len(test)
        tar.addfile(info, io.BytesIO(test))
    layers = [machine_layer(), buffer.getvalue()]
    env = ["PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"]
    layout = make_image(layers, env, compress=lambda data: data)
    return str(write_layout(layout, tmp_path_factory.mktemp("image") / "oci"))


def task_of(fix: Fix, image: str, form: str, place: Path) -> Task:
    row: dict[str, Any] = {**FORMS[form.partition(",")[0]](fix), "image": image}
    if form == "smith":
        row["base_commit"] = fix.future
    if form == "r2e, tests of the image":
        row["execution_result_content"] = None
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = load_tasks(place / "rows.jsonl")
    return task


@pytest.mark.parametrize("form", [*FORMS, "r2e, tests of the image"])
async def test_a_row_that_names_an_image(
    backend: SandboxBackend, fix: Fix, image: str, tmp_path: Path, form: str
) -> None:
    task = task_of(fix, image, form, tmp_path)
    assert task.gold_patch is not None
    async with await backend.create(SandboxSpec(image=task.image, workdir=task.workdir)) as sandbox:
        prepared = await prepare(sandbox, task)
        await sandbox.write_file("/tmp/solution.patch", task.gold_patch)
        done = await sandbox.exec(WORK, cwd=task.workdir, env={"FUTURE": "none" if form == "smith" else fix.future})
        assert done.ok, done.text()
        patch = await capture(sandbox, prepared, workdir=task.workdir)
    assert patch.files == ("parse.py",)
    solved, nothing = await asyncio.gather(grade(task, patch, backend), grade(task, b"", backend))
    assert (solved.reward, nothing.reward) == (1.0, 0.0), solved.detail
