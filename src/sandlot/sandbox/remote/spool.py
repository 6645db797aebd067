"""A command of a cloud sandbox as files in it, so that one short call at a time is all its API must offer.

The command runs detached and writes to files; it outlives a dropped connection, and its bytes stay bytes where an
SDK hands out text only. Reading may be repeated; starting is never.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from sandlot.errors import SandboxError, SandboxLostError

DIRECTORY = "/tmp/.sandlot"
"""Of root, and closed to everybody else."""
_PIECE = 1 << 20
_ARGUMENT = 32 << 10
"""Bytes of a script that go as an argument, in base64: Modal takes 64 KiB of arguments."""
_LEFTOVER_SECONDS = 3.0
_PAUSES = (0.05, 1.5)
_FAULTS = 5
_BEYOND = 1 << 60

# Pipes between, so that /dev/stdout can be opened by name, for which they and stdin belong to the command's user.
_RUN = """
d={directory}
cd / && mkfifo -m 600 $d/o $d/e && chmod 400 $d/in && chown {owner}:{owner} $d/o $d/e $d/in || exit 1
{{ cat <$d/o >$d/out & echo $! >$d/o.pid; wait; : >$d/o.end; }} &
{{ cat <$d/e >$d/err & echo $! >$d/e.pid; wait; : >$d/e.end; }} &
{command} <$d/in >$d/o 2>$d/e
echo $? >$d/code.new; mv $d/code.new $d/code
"""

# $1: directory; $2, $3: bytes of stdout and stderr that are known; $4: bytes at most. A command that is gone without an
# exit code was killed together with what would have written it. Who passes its output on sleeps when there is no more.
_LOOK = """
cd "$1" 2>/dev/null || exit 9
read -r p <pid; read -r s 2>/dev/null <"/proc/$p/stat"; s=${s##*") "}
c=$(cat code 2>/dev/null)
case $s in "" | Z* | X*) killed=${c:-idle}; c=${c:-137} ;; esac
echo "code $c"
passed=whole
for f in o e; do
    [ -e $f.end ] && continue
    [ $passed = busy ] || passed=idle
    p=; s=R
    read -r p 2>/dev/null <$f.pid && { s=; read -r s 2>/dev/null <"/proc/$p/stat"; s=${s##*") "}; }
    case $s in "" | S* | Z* | X*) ;; *) passed=busy ;; esac
done
[ "$killed" = idle ] && passed=idle
echo "passed $passed"
for f in out err; do
    printf '%s ' $f; tail -c "+$(($2 + 1))" $f 2>/dev/null | head -c "$4" | base64 | tr -d '\\n'; echo; shift
    set -- "$1" "$2" "$3" "${4:-$3}"
done
"""

Call = Callable[[str, float], Awaitable[tuple[int, str]]]
"""Run a shell line as root within some seconds: its exit code and stdout."""
Put = Callable[[str, bytes], Awaitable[None]]
"""Write a file as root."""


class SpooledStream:
    """See `Stream`."""

    def __init__(self, call: Call, directory: str) -> None:
        self._call, self._directory = call, directory
        self._known = {1: 0, 2: 0}
        self._ready: list[tuple[int, bytes]] = []
        self._code: int | None = None
        self._pause = _PAUSES[0]
        self._ended_at: float | None = None
        self._idle = False

    @classmethod
    async def start(
        cls,
        call: Call,
        put: Put,
        mark: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes,
        owner: int,
    ) -> SpooledStream:
        """Start a command; `mark` names its directory, `owner` is the id of its user."""
        directory = f"{DIRECTORY}/{mark}"
        command = shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *argv])
        # As a file: whoever is inside may read the arguments of every process.
        script = _RUN.format(directory=directory, owner=owner, command=command).encode()
        given = f"echo {base64.b64encode(script).decode()} | base64 -d >{directory}/run"
        make = f"mkdir {directory} && : >{directory}/in"
        if stdin or len(script) > _ARGUMENT:
            code, said = await call(make, 60.0)
            if code != 0:
                raise SandboxError(f"the sandbox cannot start a command: {said.strip()[-300:] or f'exit {code}'}")
            if stdin:
                await put(f"{directory}/in", stdin)
            if len(script) > _ARGUMENT:
                await put(f"{directory}/run", script)
                given = "true"
            make = "true"
        start = f"nohup setsid sh {directory}/run >/dev/null 2>&1 </dev/null & echo $! >{directory}/pid"
        code, said = await call(f"{{ {make} && {given}; }} || exit 1; {start}", 60.0)
        if code != 0:
            raise SandboxError(f"the sandbox did not start a command: {said.strip()[-300:] or f'exit {code}'}")
        return cls(call, directory)

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        faults = 0
        while not self._ready:
            if self._code is not None:
                return None
            try:
                found, faults = await self._look(), 0
            except SandboxError as error:
                faults += 1
                if not error.retryable or isinstance(error, SandboxLostError) or faults > _FAULTS:
                    raise
                found = False
            if not found:
                await asyncio.sleep(self._pause)
                self._pause = min(_PAUSES[1], self._pause * 1.4)
        return self._ready.pop(0)

    async def _look(self) -> bool:
        """Fetch what is new; whether there was anything. The end is the look that finds nothing after the exit code.

        May be repeated: what is known counts in bytes.
        """
        line = ["sh", "-c", _LOOK, "sh", self._directory, str(self._known[1]), str(self._known[2]), str(_PIECE)]
        code, said = await self._call(shlex.join(line), 60.0)
        if code == 9:
            raise SandboxError("the files of a command are gone from the sandbox", retryable=False)
        fields = dict(row.partition(" ")[::2] for row in said.splitlines())
        found = False
        for kind, name in ((1, "out"), (2, "err")):
            try:
                data = base64.b64decode(fields.get(name, ""), validate=True)
            except binascii.Error as error:
                raise SandboxError(f"the sandbox sent damaged output: {error}") from error
            if data:
                found = True
                self._known[kind] += len(data)
                self._ready.append((kind, data))
        if found:
            self._pause = _PAUSES[0]
            self._idle = False
        elif (ended := fields.get("code", "").strip()).lstrip("-").isdigit():
            # Daemons may hold the output open, so its end is not waited for, only what is on the way.
            self._ended_at = self._ended_at or time.monotonic()
            self._pause = _PAUSES[0]
            # Not every kernel says at once that who slept is awake, so that is asked twice.
            passed, was_idle = fields.get("passed"), self._idle
            self._idle = passed == "idle"
            late = time.monotonic() - self._ended_at > _LEFTOVER_SECONDS
            if passed == "whole" or (self._idle and was_idle) or late:
                self._code = int(ended)
                return True
        return found

    async def write(self, data: bytes) -> None:
        """Everything was given at the start."""

    def skip(self, kind: int) -> None:
        """See `Stream.skip`."""
        self._known[kind] = _BEYOND

    async def exit_code(self) -> int | None:
        """See `Stream.exit_code`."""
        return self._code

    async def close(self) -> None:
        """Remove the files; a command that still runs keeps them open."""
        await self._call(f"rm -rf {self._directory}", 60.0)
