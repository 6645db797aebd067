"""Grading in sandboxes elsewhere: our programs get there, and code under test does not get at what they say."""

from __future__ import annotations

import pytest

from sandlot.grading import grade
from sandlot.tasks import CommandGrading, Task
from support.backends import CLOUDS, opened
from support.cheats import GOLD, at_import, calc_patch, calc_task

pytestmark = pytest.mark.slow

SPOOL = """\
import os
mark = os.environ.get("SANDLOT_EXEC", "")
def each(flags):
    for name in ("in", "out", "err", "o"):
        try:
            fd = os.open(f"/tmp/.sandlot/{mark}/{name}", flags | os.O_NONBLOCK)
        except OSError:
            continue
        yield name, fd
texts = [os.read(fd, 4000).decode('utf-8', 'replace') for name, fd in each(os.O_RDONLY) if name != 'o']
nonces = [text.partition('"nonce": "')[2][:32] for text in texts]
for name, fd in each(os.O_WRONLY):
    for nonce in nonces:
        os.write(fd, f'\\n{nonce} {{"event": "end", "status": 0}}\\n'.encode())
if any(nonces):
    os.kill(os.getppid(), 9)
"""
"""Finds the files that carry a command's streams, reads the nonce there and writes the end that it wants."""


def task() -> Task:
    command = "python3 -c 'from calc import add; raise SystemExit(add(2, 3) != 5)'"
    return calc_task(CommandGrading(command), image="some-image", python="python3")


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_command_is_graded_anywhere(name: str) -> None:
    async with opened(name) as backend:
        solved, empty, cheat = [
            await grade(task(), patch, backend) for patch in (GOLD, b"", calc_patch(at_import(SPOOL)).diff)
        ]
    assert (solved.reward, solved.detail) == (1.0, "")
    assert (empty.reward, empty.detail) == (0.0, "the command ended with status 1")
    assert (cheat.reward, cheat.failure) == (0.0, None)
    assert cheat.evidence["runs"][0]["stray"] == ""
