"""The process that forks sandboxes, seen from Sandlot: started, asked, replaced when it was killed."""

from __future__ import annotations

import secrets
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
from sandlot.sandbox.local import systemd
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

    def __init__(self, run_dir: Path, lock: int, *, in_scope: bool = False) -> None:
        """`in_scope`: start it in a scope of the user's systemd, of which `settle` tells the limit group."""
        self._run_dir, self._lock, self._in_scope = run_dir, lock, in_scope
        self._ids: Ids | None = None
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START]
        if self._in_scope:
            command = [*systemd.scope(f"sandlot-{self._run_dir.name}-{secrets.token_hex(3)}"), *command]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(_PACKAGE), str(theirs.fileno()), str(self._run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=systemd.environment() if self._in_scope else {},
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

    def revive(self) -> bool:
        """Replace it when it was killed; its sandboxes live on with their keepers. Whether that was so."""
        if self._process.poll() is None:
            return False
        self._control.close()
        self._start()
        if self._ids is not None:
            self.prepare(self._ids)
        return True

    def settle(self, mount_point: Path) -> tuple[str, list[str]]:
        """Make its own limit group one for sandboxes; its path and controllers. `SandboxError` when it cannot be."""
        answer = self._asked(b"g", {"mount_point": str(mount_point)})
        if answer is None or "error" in answer:
            raise SandboxError(f"no limit groups in a scope of systemd: {(answer or {}).get('error', 'none was made')}")
        return answer["path"], answer["controllers"]

    def boot(self, body: dict[str, Any], fds: Sequence[int]) -> None:
        """Have a keeper boot a sandbox; `fds` are its ends of the life channel and the control stream."""
        self._send(b"c", body, fds)

    def trial(self, what: str, **details: Any) -> str | None:
        """Run a trial of `jail.probe` in a child; why it failed, None when it works. Blocks."""
        answer = self._asked(b"p", {"what": what, **details})
        return "it was killed" if answer is None else answer["error"]

    def _asked(self, op: bytes, body: dict[str, Any]) -> dict[str, Any] | None:
        ours, theirs = wire.packet_pair()
        with ours:
            with theirs:
                self._send(op, body, [theirs.fileno()])
            ours.settimeout(20)
            try:
                return wire.receive_packet(ours)[0]
            except TimeoutError:
                return {"error": "it did not end within 20 s"}

    def kill(self) -> None:
        """End it at once; the run goes on with another one."""
        self._control.close()
        self._process.kill()
        self._process.wait()

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
