"""Runs tests inside the sandbox and reports over its own stdout, which the code under test does not get.

Started as `python3 -I run.py` with one JSON document as its stdin. Nothing of the workdir is importable before pytest
and the witness are, so nothing there can take their place. It ends without running exit handlers.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def channel_fd() -> int:
    """The process's stdout, moved out of reach: descriptor 1 is stderr from now on, descriptor 0 is empty."""
    fd = os.dup(1)
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return fd


def import_pytest(libraries: list[str]) -> tuple[Any, Any]:
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


def selector(names: list[str] | None, controls: set[str]) -> Callable[[list[str]], list[str]]:
    """Keep the required tests (all, where none are named), in their order, between the control tests."""

    def keep(ids: list[str]) -> list[str]:
        mine = [name for name in ids if name.partition("::")[0] in controls]
        wanted = [name for name in ids if names is None or name in required or any(is_cut(r, name) for r in required)]
        half = len(mine) // 2
        return mine[:half] + [name for name in wanted if name not in mine] + mine[half:]

    def is_cut(short: str, name: str) -> bool:
        short = short.rstrip()
        return "[" in short and not short.endswith("]") and name.startswith(short)

    required = {name.rstrip() for name in names or ()}
    return keep


def options(task: dict[str, Any]) -> list[str]:
    return [
        "--rootdir", task["workdir"], "-p", "no:cacheprovider", "--color=no", "--tb=short", "--maxfail=0", "-rN",
        "--continue-on-collection-errors",
    ]  # fmt: skip


def run_named(task: dict[str, Any], channel: Any, pytest: Any, witness: Any) -> int:
    """The required tests and the control tests in one session."""
    plugin = witness.Witness(channel, "main", selector(task["required"], set(task["controls"])), task["workdir"])
    files = [name for name in task["files"] if os.path.exists(name)]
    return int(pytest.main(options(task) + files, plugins=[plugin]))


def run_script(task: dict[str, Any], channel: Any, pytest: Any, witness: Any) -> int:
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


def run_command(task: dict[str, Any], nonce: str, fd: int) -> int:
    """A shell command; every pytest that it starts finds the witness in its environment."""
    environment = dict(os.environ)
    old = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([HERE, *([old] if old else [])])
    environment["PYTEST_ADDOPTS"] = "-p sandlot_witness -p no:cacheprovider"
    environment["SANDLOT_WITNESS"] = f"{fd} {nonce}"
    # What the command prints is its log; only the channel goes to our stdout.
    return subprocess.call(
        task["argv"], stdin=subprocess.DEVNULL, env=environment, cwd=task["workdir"], pass_fds=(fd,)
    )  # fmt: skip


def told(fd: int, nonce: str, event: dict[str, Any]) -> None:
    os.write(fd, f"\n{nonce} {json.dumps(event)}\n".encode())


def main() -> int:
    task = json.loads(sys.stdin.buffer.read())
    nonce = task.pop("nonce")
    fd = channel_fd()
    os.chdir(task["workdir"])
    if task["mode"] == "command":
        told(fd, nonce, {"event": "hello", "python": sys.version, "pytest": ""})
        status = run_command(task, nonce, fd)
        status = status if status >= 0 else 128 - status
        told(fd, nonce, {"event": "end", "status": status})
        return status
    pytest, witness = import_pytest(task["libraries"])
    channel = witness.Channel(fd, nonce)
    del nonce
    channel.send(event="hello", python=sys.version, pytest=pytest.__version__)
    status = {"pytest": run_named, "script": run_script}[task["mode"]](task, channel, pytest, witness)
    channel.send(event="end", status=status)
    return status


status = 70
try:
    status = main()
except BaseException:
    traceback.print_exc()
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
