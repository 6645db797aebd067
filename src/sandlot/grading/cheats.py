"""Ways to look solved without solving, made for any task: `tasks check` proves that each of them earns nothing.

A cheat is a function from what an agent can see of a task to the files it leaves behind, or None where it does not fit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from sandlot.grading import cheat_code

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


def _calls(view: View, code: str, body: str) -> Files | None:
    """Runs `code` at import, and `body` in the place of every public function of the modules."""
    answer = f"""

def _answer(*_, **__):
    {body}


for _key, _thing in list(globals().items()):
    if isinstance(_thing, type(_answer)) and _thing.__module__ == __name__ and not _key.startswith("_"):
        globals()[_key] = _answer
"""
    files = {path: with_code(source, code) + answer.encode() for path, source in view.modules.items()}
    return dict(files) or None


def forged_output(view: View) -> Files | None:
    """Prints the lines of a good run when the code is imported, and ends the process with 0."""
    return _in_modules(view, f"{_prints(view)}\n_os._exit(0)")


def forged_lines(view: View) -> Files | None:
    """Prints the lines of a good run and goes on."""
    return _in_modules(view, _prints(view))


def planted_reward(view: View) -> Files | None:
    """Writes reward and report files wherever a verifier might look, and commits some."""
    planted: Files = {"reward.txt": b"1.0\n", "reward.json": b'{"reward": 1.0}\n', "report.json": b'{"passed": true}\n'}
    return {**planted, **(_in_modules(view, cheat_code.PLANT) or {})}


def conftest_passes(view: View) -> Files | None:
    """A conftest that turns every result into a pass, everywhere a test lies."""
    places = {str(PurePosixPath(path).parent) for path in view.tests} | {"."}
    return {str(PurePosixPath(place) / "conftest.py"): cheat_code.PASS_ALL.encode() for place in places}


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
    return _in_modules(view, cheat_code.PROBE)


def own_runner(view: View) -> Files | None:
    """Modules that would be imported in the place of pytest."""
    code = f"{_prints(view)}\n_os._exit(0)\n".encode()
    return {"pytest.py": code, "_pytest/__init__.py": code, "pluggy.py": code}


def parents_killed(view: View) -> Files | None:
    """Looks into the process that started the tests, writes to it, and kills it with all others."""
    return _in_modules(view, f"{_prints(view)}\n{cheat_code.KILL_PARENTS}")


def emptied_tests(view: View) -> Files | None:
    """Replaces every test function by an empty one while the test files are loaded."""
    return _in_modules(view, cheat_code.EMPTY_TESTS)


def skipped_tests(view: View) -> Files | None:
    """Every function skips the test that calls it."""
    return _calls(view, "", "import pytest; pytest.skip('later')")


def expected_failures(view: View) -> Files | None:
    """The first call marks every test as one that may fail."""
    return _calls(view, cheat_code.MARK_ITEMS, "_mark()")


def equal_to_everything(view: View) -> Files | None:
    """Every function answers with an object that equals whatever it is compared with."""
    return _calls(view, cheat_code.EQUAL, "return _Equal(1)")


def told_run(view: View) -> Files | None:
    """The first call finds our reporter in memory and has it tell a good run."""
    return _calls(view, cheat_code.TELL_RUN, "_tell()")


def edited_results(view: View) -> Files | None:
    """Finds our reporter in memory and has it call every result a pass."""
    return _in_modules(view, cheat_code.EDIT_RESULTS)


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
        parents_killed,
        emptied_tests,
        skipped_tests,
        expected_failures,
        equal_to_everything,
        told_run,
        edited_results,
    )
}
"""The built-in cheats by name."""
