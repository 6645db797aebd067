"""One process of tests: started by `run.py` as the tests' user, with the order as its stdin.

Nothing of the workdir is importable before pytest and the witness are, so nothing there can take their place. It ends
without running exit handlers.
"""

import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def import_pytest(libraries: "list[str]") -> "tuple[Any, Any]":
    """Import pytest from `libraries`, or from the environment, before anything of the workdir can be imported."""
    sys.path[:0] = [HERE, *libraries]
    import pytest

    sandlot_witness = importlib.import_module("sandlot_witness")

    sys.path.remove(HERE)
    for path in libraries:
        sys.path.remove(path)
        sys.path.append(path)
    # A task may be about one of the libraries that pytest uses: let it be imported from the workdir.
    for name in list(sys.modules):
        if name.partition(".")[0] in ("iniconfig", "packaging", "pygments"):
            file = getattr(sys.modules[name], "__file__", None) or ""
            if any(file.startswith(path) for path in libraries):
                del sys.modules[name]
    return pytest, sandlot_witness


def selector(names: "list[str] | None", controls: "set[str]") -> "Callable[[list[str]], list[str]]":
    """Keep the required tests (all, where none are named), in their order, between the control tests."""

    def keep(ids: "list[str]") -> "list[str]":
        mine = [name for name in ids if name.partition("::")[0] in controls]
        wanted = [name for name in ids if names is None or name in required or any(is_cut(r, name) for r in required)]
        half = len(mine) // 2
        return mine[:half] + [name for name in wanted if name not in mine] + mine[half:]

    def is_cut(short: str, name: str) -> bool:
        short = short.rstrip()
        return "[" in short and not short.endswith("]") and name.startswith(short)

    required = {name.rstrip() for name in names or ()}
    return keep


def options(task: "dict[str, Any]") -> "list[str]":
    return [
        "--rootdir", task["workdir"], "-p", "no:cacheprovider", "--color=no", "--tb=short", "--maxfail=0", "-rN",
        "--continue-on-collection-errors",
    ]  # fmt: skip


def run_named(task: "dict[str, Any]", channel: Any, pytest: Any, witness: Any) -> int:
    """The required tests and the control tests in one session."""
    plugin = witness.Witness(channel, "main", selector(task["required"], set(task["controls"])), task["workdir"])
    files = [name for name in task["files"] if os.path.exists(name)]
    return int(pytest.main(options(task) + files, plugins=[plugin]))


def run_script(task: "dict[str, Any]", channel: Any, pytest: Any, witness: Any) -> int:
    """A script that calls `pytest.main` by itself, then the control tests in the same process."""
    own_main = pytest.main
    sessions: list[int] = []

    def main(args: Any = None, plugins: Any = None) -> Any:
        sessions.append(len(sessions))
        plugin = witness.Witness(channel, f"main-{len(sessions)}")
        return own_main(args, [*(plugins or []), plugin])

    pytest.main = main
    sys.path.insert(0, task["workdir"])
    sys.argv = [task["script"]]
    status = 0
    try:
        runpy.run_path(task["script"], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    plugin = witness.Witness(channel, "controls")
    controls = [os.path.join(task["workdir"], name) for name in task["controls"]]
    own_main(options(task) + controls, plugins=[plugin])
    return int(status)


def main() -> int:
    task = json.loads(sys.stdin.buffer.read())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    pytest, witness = import_pytest(task["libraries"])
    channel = witness.Channel(task.pop("address"))
    channel.send(event="hello", session="", python=sys.version, pytest=pytest.__version__)
    return {"pytest": run_named, "script": run_script}[task["mode"]](task, channel, pytest, witness)


status = 70
try:
    status = main()
except BaseException:
    traceback.print_exc()
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
