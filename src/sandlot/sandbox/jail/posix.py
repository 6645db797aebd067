"""What several files do with descriptors and children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def reap(how: int = 0) -> None:
    """Take note of all children that have ended; unless `how` is `WNOHANG`, when all have."""
    try:
        while os.waitpid(-1, how)[0]:
            pass
    except ChildProcessError:
        pass
