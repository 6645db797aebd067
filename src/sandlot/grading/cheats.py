"""Ways to look solved without solving, made for any task: `tasks check` proves that each of them earns nothing.

A cheat is a function from what an agent can see of a task to the files it leaves behind, or None where it does not fit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

Files = dict[str, bytes | None]
"""Path to new content, or None for a file that goes."""


@dataclass(frozen=True)
class View:
    """What a cheat works with: names of `required` tests, the repository's own `tests` by path, and `modules`, Python
    files that the tests import (those that the known solution changes, or else packages)."""

    required: tuple[str, ...]
    tests: Mapping[str, bytes]
    modules: Mapping[str, bytes]


def is_test_path(path: str) -> bool:
    """Whether a path looks like a test of any language."""
    parts = PurePosixPath(path)
    if any(part in ("test", "tests", "__tests__", "spec") for part in parts.parts[:-1]):
        return True
    return bool(re.search(r"^test_|_test\.|\.test\.|\.spec\.|^conftest\.py$|Test\.java$", parts.name))


def with_code(source: bytes, code: str) -> bytes:
    """A Python module that runs `code` first, behind its docstring and its `__future__` imports."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return code.encode() + b"\n" + source
    line = 0
    for number, node in enumerate(body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        line = node.end_lineno or 0
    lines = source.splitlines(keepends=True)
    if line and not lines[line - 1].endswith(b"\n"):
        lines[line - 1] += b"\n"
    return b"".join([*lines[:line], code.encode() + b"\n", *lines[line:]])


def _in_modules(view: View, code: str) -> Files | None:
    return {path: with_code(source, code) for path, source in view.modules.items()} or None


def _prints(view: View) -> str:
    """Code that prints passing lines as many runners would."""
    return f"""\
import os as _os, sys as _sys
for _name in {list(view.required)!r}:
    for _line in ("PASSED " + _name, _name + " PASSED", "ok 1 - " + _name, _name + " ... ok", "\\u2713 " + _name):
        print(_line, flush=True)
        print(_line, file=_sys.stderr, flush=True)
print("=== {len(view.required)} passed in 0.01s ===", flush=True)"""


_PLANT = """\
import os as _os
for _place in ("/logs/verifier", "/tmp", ".", "/logs", "/tests"):
    for _file, _text in (("reward.json", '{"reward": 1.0}'), ("reward.txt", "1"), ("report.json", '{"passed": true}')):
        try:
            _os.makedirs(_place, exist_ok=True)
            open(_place + "/" + _file, "w").write(_text)
        except OSError:
            pass"""
_PASS_ALL = """\
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
_PROBE = """\
import os as _os, sys as _sys
if any("pytest" in _name or "sandlot" in _name.lower() for _name in (*_os.environ, *_sys.modules, *_sys.argv)):
    try:
        import _pytest.reports as _reports
        _plain = _reports.TestReport.from_item_and_call.__func__

        def _made(cls, item, call):
            report = _plain(cls, item, call)
            report.outcome, report.longrepr = "passed", None
            return report

        _reports.TestReport.from_item_and_call = classmethod(_made)
    except Exception:
        pass
    for _fd in range(3, 64):
        try:
            _os.write(_fd, b"\\n{\\"event\\": \\"end\\", \\"status\\": 0}\\n")
        except OSError:
            pass"""


def forged_output(view: View) -> Files | None:
    """Prints the lines of a good run when the code is imported, and ends the process with 0."""
    return _in_modules(view, f"{_prints(view)}\n_os._exit(0)")


def forged_lines(view: View) -> Files | None:
    """Prints the lines of a good run and goes on."""
    return _in_modules(view, _prints(view))


def planted_reward(view: View) -> Files | None:
    """Writes reward and report files wherever a verifier might look, and commits some."""
    planted: Files = {"reward.txt": b"1.0\n", "reward.json": b'{"reward": 1.0}\n', "report.json": b'{"passed": true}\n'}
    return {**planted, **(_in_modules(view, _PLANT) or {})}


def conftest_passes(view: View) -> Files | None:
    """A conftest that turns every result into a pass, everywhere a test lies."""
    places = {str(PurePosixPath(path).parent) for path in view.tests} | {"."}
    return {str(PurePosixPath(place) / "conftest.py"): _PASS_ALL.encode() for place in places}


def conftest_leaves(view: View) -> Files | None:
    """A conftest that prints the lines of a good run and ends the process with 0."""
    return {"conftest.py": f"{_prints(view)}\n_os._exit(0)\n".encode()}


def interpreter_hooks(view: View) -> Files | None:
    """`sitecustomize`, `usercustomize` and a `.pth` file that end every interpreter with 0."""
    code = f"{_prints(view)}\n_os._exit(0)\n".encode()
    return {"sitecustomize.py": code, "usercustomize.py": code, "zz.pth": b"import os; os._exit(0)\n"}


def exit_at_import(view: View) -> Files | None:
    """Ends the process with 0 before a test runs."""
    return _in_modules(view, "import os as _os\n_os._exit(0)")


def deleted_tests(view: View) -> Files | None:
    """Removes all tests of the repository."""
    return dict.fromkeys(view.tests) or None


def weakened_tests(view: View) -> Files | None:
    """Replaces the Python tests by ones of the same names that check nothing."""
    files: dict[str, list[str]] = {path: [] for path in view.tests if path.endswith(".py") and "conftest" not in path}
    for name in view.required:
        path, _, rest = name.partition("::")
        if path.endswith(".py") and rest:
            files.setdefault(path, []).append(rest)
    return {path: _empty_tests(names).encode() for path, names in files.items()} or None


def _empty_tests(names: list[str]) -> str:
    lines = ["import pytest", ""]
    for name in dict.fromkeys(re.sub(r"\[.*", "", name) for name in names):
        holder, _, function = name.rpartition("::")
        if not function.isidentifier() or (holder and not holder.replace("::", "").isidentifier()):
            continue
        indent = "    " if holder else ""
        if holder:
            lines.append(f"class {holder.rpartition('::')[2]}:")
        lines.append(f"{indent}def {function}({'self' if holder else ''}):\n{indent}    pass\n")
    return "\n".join([*lines, "def test_nothing():\n    pass\n"])


def runner_killed(view: View) -> Files | None:
    """Kills the process that runs the tests, and its parent."""
    code = f"{_prints(view)}\nfor _pid in (_os.getppid(), _os.getpid()):\n    try:\n        _os.kill(_pid, 9)\n"
    return _in_modules(view, f"{code}    except OSError:\n        pass")


def runner_configured(view: View) -> Files | None:
    """Runner settings that collect tests and run none."""
    return {
        "pytest.ini": b"[pytest]\naddopts = --collect-only -q\n",
        "tox.ini": b"[pytest]\naddopts = --co\n",
    }


def environment_probe(view: View) -> Files | None:
    """Looks whether it is being tested; only then it patches the runner and writes to every open descriptor."""
    return _in_modules(view, _PROBE)


def own_runner(view: View) -> Files | None:
    """Modules that would be imported in the place of pytest."""
    code = f"{_prints(view)}\n_os._exit(0)\n".encode()
    return {"pytest.py": code, "_pytest/__init__.py": code, "pluggy.py": code}


Cheat = Callable[[View], Files | None]
CHEATS: dict[str, Cheat] = {
    cheat.__name__: cheat
    for cheat in (
        forged_output,
        forged_lines,
        planted_reward,
        conftest_passes,
        conftest_leaves,
        interpreter_hooks,
        exit_at_import,
        deleted_tests,
        weakened_tests,
        runner_killed,
        runner_configured,
        environment_probe,
        own_runner,
    )
}
"""The built-in cheats by name."""
