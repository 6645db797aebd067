"""The process that forks sandboxes, seen from Sandlot: started, asked, replaced when it was killed."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandlot.errors import SandboxError
from sandlot.sandbox.jail import wire
from sandlot.sandbox.local.ids import Ids

_PACKAGE = Path(__file__).resolve().parents[2]
_START = """
import sys, types
for name, path in (("sandlot", sys.argv[1]), ("sandlot.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)  # the packages themselves would import much more than is needed
    sys.modules[name].__path__ = [path]
for name in ("bz2", "lzma", "zlib"):
    sys.modules[name] = None  # every fork would pay for their libraries
from sandlot.sandbox.jail.zygote import main
main(int(sys.argv[2]), sys.argv[3])
"""


class Zygote:
    """See `jail.zygote`. It shares the lock of its run, so that the run lives as long as either of us."""

    def __init__(self, run_dir: Path, lock: int) -> None:
        self._run_dir, self._lock = run_dir, lock
        self._ids: Ids | None = None
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(_PACKAGE), str(theirs.fileno()), str(self._run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=[theirs.fileno(), self._lock],
                start_new_session=True,
            )
        ours.settimeout(20)
        self._control = ours

    def prepare(self, ids: Ids) -> None:
        """Say which ids all sandboxes will have, so that the first is made ready now."""
        self._ids = ids
        self._send(b"i", asdict(ids), ())

    def revive(self) -> None:
        """Replace it when it was killed; its sandboxes live on with their keepers."""
        if self._process.poll() is not None:
            self._control.close()
            self._start()
            if self._ids is not None:
                self.prepare(self._ids)

    def boot(self, body: dict[str, Any], fds: Sequence[int]) -> None:
        """Have a keeper boot a sandbox; `fds` are its ends of the life channel and the control stream."""
        self._send(b"c", body, fds)

    def trial(self, what: str, **details: Any) -> str | None:
        """Run a trial of `jail.probe` in a child; why it failed, None when it works. Blocks."""
        ours, theirs = wire.packet_pair()
        with ours:
            with theirs:
                self._send(b"p", {"what": what, **details}, [theirs.fileno()])
            ours.settimeout(20)
            try:
                answer, _ = wire.receive_packet(ours)
            except TimeoutError:
                return "it did not end within 20 s"
        return "it was killed" if answer is None else answer["error"]

    def stop(self) -> None:
        """Let it end: after its sandboxes, it removes what is left of the run."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)

    def _send(self, op: bytes, body: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            wire.send_request(self._control, op, body, fds)
        except (OSError, TimeoutError) as error:
            raise SandboxError(f"the process that forks sandboxes is gone ({error}); try again") from error
