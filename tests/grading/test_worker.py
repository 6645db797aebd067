"""The programs that run in a task's image: on any interpreter from Python 3.6, and heard only from a test session."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sandlot.grading

WORKER = Path(sandlot.grading.__file__).parent / "worker"
INTERPRETERS = sorted(
    {*map(str, Path(sys.base_prefix).parent.glob("3.*/bin/python3")), "/usr/bin/python3", sys.executable}
)
"""This one, the system's, and those installed beside this one."""


def run(python: str, workdir: Path, *argv: str) -> tuple[list[dict[str, Any]], int]:
    """The events of a command, and how our program ended."""
    order = {"mode": "command", "nonce": "n", "user": "root", "workdir": str(workdir), "controls": [], "libraries": []}
    done = subprocess.run(
        [python, "-I", "-S", WORKER / "run.py"],
        input=json.dumps({**order, "argv": argv}).encode(), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line]
    assert all(line.startswith(b"n ") for line in lines), done
    return [json.loads(line[2:]) for line in lines], done.returncode


@pytest.mark.parametrize("file", sorted(WORKER.glob("*.py")), ids=lambda file: file.name)
def test_nothing_newer_than_python_3_6_is_written(file: Path) -> None:
    tree = ast.parse(file.read_text(), feature_version=(3, 6))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom():
                assert node.module != "__future__", "its annotations are of 3.7"
            case ast.AnnAssign():
                assert not isinstance(node.value, ast.Yield), "3.8"
            case ast.arg() | ast.FunctionDef():
                told = node.annotation if isinstance(node, ast.arg) else node.returns
                assert told is None or isinstance(told, ast.Name | ast.Constant), "evaluated, unless it is quoted"


@pytest.mark.parametrize("python", INTERPRETERS)
def test_every_interpreter_here_runs_it(python: str, tmp_path: Path) -> None:
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    events, code = run(python, tmp_path, "sh", "-c", "exit 3")
    assert [event["event"] for event in events] == ["hello", "end"]
    assert (events[1]["status"], code) == (3, 3)


@pytest.mark.parametrize(("command", "status"), [("kill -9 $$", 137), ("exec sleep 0", 0), ("no-such-program", 127)])
def test_how_a_command_ended(tmp_path: Path, command: str, status: int) -> None:
    events, code = run(sys.executable, tmp_path, "sh", "-c", command)
    assert (events[-1], code) == ({"event": "end", "status": status}, status)


CLIENT = """\
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect("\\0" + os.environ["SANDLOT_WITNESS"])
token = door.makefile("rb").readline().decode().strip()
for text in sys.argv[1:]:
    door.sendall(text.replace("TOKEN", token).encode())
"""


def told(tmp_path: Path, *texts: str, how: str = "exec {}") -> list[dict[str, Any]]:
    """The events when a process of a command sends these texts; `how` starts it."""
    (tmp_path / "client.py").write_text(CLIENT)
    command = how.format(f'{sys.executable} client.py "$@"')
    return run(sys.executable, tmp_path, "sh", "-c", command, "sh", *texts)[0][1:-1]


def test_a_session_is_heard(tmp_path: Path) -> None:
    assert told(
        tmp_path, 'TOKEN {"event": "start", "session": "s"}\n', 'TOKEN {"event": "x", "session": "s"', "}\n"
    ) == [
        {"event": "start", "session": "1/s"},
        {"event": "x", "session": "1/s"},
    ]


@pytest.mark.parametrize(
    "text",
    [
        "junk\n",
        "TOKEN junk\n",
        "TOKEN []\n",
        "TOKEN 5\n",
        "TOKEN {",
        'x {"event": "start", "session": "s"}\n',
        'TOKEN {"session": "s"}\n',
        'TOKEN {"event": "start"}\n',
        'TOKEN {"event": {}, "session": "s"}\n',
        'TOKEN {"event": "end", "session": "s", "status": 0}\n',
        'TOKEN {"event": "stray", "session": "s", "text": ""}\n',
    ],
)
def test_what_is_no_event_of_a_session_is_stray(tmp_path: Path, text: str) -> None:
    assert [event["event"] for event in told(tmp_path, text)] == ["stray"]


@pytest.mark.parametrize(
    "how",
    [
        "{} ; {}",
        "setsid sh -c '{} & sleep 0.2' sh \"$@\"; wait",
    ],
)
def test_several_sessions_of_one_command(tmp_path: Path, how: str) -> None:
    command = how.replace("{}", f'{sys.executable} client.py "$@"')
    (tmp_path / "client.py").write_text(CLIENT)
    events = run(sys.executable, tmp_path, "sh", "-c", command, "sh", 'TOKEN {"event": "start", "session": "s"}\n')[0]
    assert {event["event"] for event in events} == {"hello", "start", "end"}
    assert len({event["session"] for event in events if event["event"] == "start"}) == command.count("client.py")


@pytest.mark.parametrize(
    "inner",
    [
        "import subprocess, sys; subprocess.run([sys.executable, 'client.py', 'x'])",
        "exec(open('client.py').read())",
        "import os; os.fork() or (os.setsid(), os.fork() and os._exit(0), exec(open('client.py').read()))",
    ],
)
def test_what_a_session_starts_is_not_let_in(tmp_path: Path, inner: str) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "session.py").write_text(f"{CLIENT}import time\ntry:\n    {inner}\nfinally:\n    time.sleep(0.3)\n")
    events = run(sys.executable, tmp_path, sys.executable, "session.py")[0]
    assert "a process that is no test session of the command connected" in [event.get("text") for event in events]
