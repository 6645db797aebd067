"""The processes under measurement: started, asked, and read from outside (on-CPU time and memory, Linux only)."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self

_ROOT = Path(__file__).parent.parent


class Measured(Protocol):
    """A gateway under measurement."""

    port: int

    def ask(self, cmd: str, **fields: Any) -> dict[str, Any]: ...

    def cpu_s(self) -> float: ...

    def memory_mb(self, field: str = "VmRSS") -> float: ...


class Served:
    """A module of this kit that runs as a process of its own and serves on a port."""

    def __init__(self, module: str, *arguments: str, python: str = sys.executable) -> None:
        argv = [python, "-m", f"gateway_kit.{module}", *arguments]
        self._process = subprocess.Popen(argv, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._line().removeprefix("READY "))

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return line

    def ask(self, cmd: str, **fields: Any) -> dict[str, Any]:
        """The answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"cmd": cmd, **fields}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def cpu_s(self) -> float:
        """Seconds its threads have been on a CPU."""
        return _cpu_s(self._process.pid)

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Resident memory now, or `VmHWM` for its peak."""
        return _memory_mb(self._process.pid, field)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


class Command:
    """`sandlot gateway` itself, with all its processes."""

    def __init__(self, model: Path, engine: str, workers: int, out: Path) -> None:
        argv = [sys.executable, "-m", "sandlot.cli", "gateway", "--engine", engine, "--engine-kind", "sglang"]
        argv += ["--model", str(model), "--port", "0", "--control-port", "0", "--out", str(out), "--json"]
        self._process = subprocess.Popen([*argv, "--workers", str(workers)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        text = "".join(iter(self._process.stdout.readline, "}\n"))
        self._told = json.loads(text + "}")
        self.port = int(self._told["base_url"].rpartition(":")[2])

    def ask(self, cmd: str, **fields: Any) -> dict[str, Any]:
        """Open a session over the control side, which is all that is asked here."""
        if cmd != "open":
            raise ValueError(cmd)
        request = urllib.request.Request(
            f"{self._told['control_url']}/control/sessions",
            json.dumps({"session_id": fields["session"]}).encode(),
            {"Authorization": f"Bearer {self._told['admin_key']}"},
        )
        with urllib.request.urlopen(request) as answer:
            return {"key": json.load(answer)["api_key"]}

    def cpu_s(self) -> float:
        """Seconds that threads of all its processes have been on a CPU."""
        return sum(map(_cpu_s, self._pids()))

    def memory_mb(self, field: str = "VmRSS") -> float:
        """The same as for one process, summed up."""
        return sum(_memory_mb(pid, field) for pid in self._pids())

    def _pids(self) -> Iterator[int]:
        pid = self._process.pid
        yield pid
        yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()


def _cpu_s(pid: int) -> float:
    """In nanosecond counts of the kernel."""
    spent = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            spent += int(path.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has just ended
    return spent / 1e9


def _memory_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024
