"""The grader of the SWE-bench form: the test patch's files, then named tests, read by pytest or an official parser."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sandlot.errors import GradingError, MissingDependencyError
from sandlot.grading.bench import Bench, NothingReportedError
from sandlot.grading.logs import verdict_of_log
from sandlot.grading.named_tests import grade_named
from sandlot.grading.names import PASSED, required_tests
from sandlot.grading.verdict import Verdict
from sandlot.tasks.swe import is_pytest_name
from sandlot.tasks.task import SwebenchGrading
from sandlot.workspace.apply import apply_to_tree
from sandlot.workspace.git import GitError, Store
from sandlot.workspace.prepare import Prepared

_STATUSES = {"PASSED": PASSED, "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "skipped"}


async def grade_swebench(bench: Bench) -> Verdict:
    """Reward 1 when every required test passed, otherwise 0 (or a fraction).

    The files of the test patch are made on the trusted side from the base, so the agent's own changes of them count
    for nothing. A row with a log parser is read by it where the `swebench` package is here; pytest's names do without.
    """
    grading = bench.task.grading
    assert isinstance(grading, SwebenchGrading)
    required = required_tests(grading)
    hidden = await asyncio.to_thread(files_of_patch, bench.prepared, grading.test_patch)
    if not grading.log_parser or (not has_swebench() and all(map(is_pytest_name, required))):
        return await grade_named(bench, hidden, required, grading.fail_to_pass, grading.pass_to_pass, grading.timeout)
    if not has_swebench():
        raise MissingDependencyError("swebench", "swebench")
    paths = [name.partition("::")[0] for name in required if is_pytest_name(name)]
    await bench.put_hidden(hidden, list(dict.fromkeys(paths)))
    place = f"/tmp/swebench-{secrets.token_hex(6)}"
    await bench.sandbox.write_file(f"{place}/tests.sh", grading.command.encode(), mode=0o755, user="root")
    await bench.sandbox.exec(["chmod", "755", place], user="root")
    run = await bench.work(
        "command", controls=[], timeout=grading.timeout, argv=["bash", f"{place}/tests.sh"]
    )  # fmt: skip
    await bench.sandbox.kill_processes()
    parsed = await asyncio.to_thread(official, grading, run[1].stderr.decode("utf-8", "replace"))
    return await verdict_of_log(bench, parsed, grading.fail_to_pass, grading.pass_to_pass, run, grading.timeout)


def files_of_patch(prepared: Prepared, patch: bytes) -> dict[str, bytes | None]:
    """The files that `patch` changes, as it leaves them on the base tree; None for those it removes. Blocking."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.create(Path(scratch) / "store", alternate=prepared.store)
        try:
            tree = apply_to_tree(store, prepared.base_tree, patch, Path(scratch) / "index")
        except GitError as error:
            said = error.stderr.decode("utf-8", "replace").strip() or str(error)
            raise GradingError(f"the test patch does not apply to the base tree: {said}") from None
        changes = store.changes(prepared.base_tree, tree)
        ids = [change.new.blob for change in changes if change.new is not None]
        contents = dict(zip(ids, store.blobs(ids), strict=True))
    return {
        change.path.decode("utf-8", "surrogateescape"): contents[change.new.blob] if change.new else None
        for change in changes
    }


def has_swebench() -> bool:
    """Whether the `swebench` package is here and has its parsers by name (from its version 5 on)."""
    try:
        return bool(_parsers())
    except (ImportError, AttributeError):
        return False


def _parsers() -> Mapping[str, Any]:
    found: Mapping[str, Any] = import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    return found


def official(grading: SwebenchGrading, log: str) -> dict[str, str]:
    """What the official parser makes of a log: test name to result. A skipped or expected failure has not passed."""
    parsers = _parsers()
    if grading.log_parser not in parsers:
        raise GradingError(f"the swebench package has no log parser called {grading.log_parser!r}")
    spec = import_module("swebench.types").TestSpec(
        instance_id="", image="", eval_script_list=[], repo="", version="", FAIL_TO_PASS=list(grading.fail_to_pass),
        PASS_TO_PASS=list(grading.pass_to_pass), log_parser=grading.log_parser,
    )  # fmt: skip
    try:
        found = parsers[grading.log_parser](log, spec)
    except Exception as error:
        what = f"the log parser {grading.log_parser} failed on the log of the tests: {error!r}"
        raise NothingReportedError(what) from error
    return {str(name): _STATUSES.get(str(status), "failed") for name, status in found.items()}
