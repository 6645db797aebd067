"""The processes under measurement: started, asked, and read from outside (on-CPU time and memory, Linux only)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).parent.parent


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
        """Seconds its threads have been on a CPU, in nanosecond counts of the kernel."""
        spent = 0
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            try:
                spent += int(path.read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has just ended
        return spent / 1e9

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Resident memory now, or `VmHWM` for its peak."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
