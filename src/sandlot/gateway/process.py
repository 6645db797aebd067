"""A process that does nothing but serve: its event loop, and memory that large bodies do not wear out."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import sys
from collections.abc import Coroutine
from typing import Any

# glibc's names for what <malloc.h> defines
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 64 << 20


def serve(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, on uvloop where it is installed."""
    keep_large_blocks()
    allow_many_connections()
    sys.setswitchinterval(0.001)  # threads that render long histories must not keep the event loop waiting
    gc.set_threshold(10_000, 20, 20)  # a turn makes thousands of objects and hardly a cycle
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def allow_many_connections() -> None:
    """Raise the bound on open files as far as that is allowed: a session has a connection and a journal."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_large_blocks() -> None:
    """Have malloc keep blocks of megabytes for the next body, instead of new pages of zeros for each.

    Does nothing where the C library is not glibc, or where the environment says what malloc should do.
    """
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)
