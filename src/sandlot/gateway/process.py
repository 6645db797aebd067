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


def serve(main: Coroutine[Any, Any, None], processes: int = 1) -> None:
    """Run `main` to its end, on uvloop where it is installed. `processes` like this one share the machine."""
    keep_large_blocks()
    allow_many_connections()
    sys.setswitchinterval(0.001)  # a thread that renders a long history must not keep the event loop waiting
    # A turn makes thousands of objects and hardly a cycle. Sessions hold no cycles: all of them are seldom searched.
    gc.set_threshold(10_000, 5, 200)
    os.environ.setdefault("RAYON_NUM_THREADS", str(encoding_threads(processes)))  # read when tokenizers first encode
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def loaded() -> None:
    """Say that what a process keeps for good is loaded: the search for cycles leaves it out from now on."""
    gc.collect()
    gc.freeze()


def encoding_threads(processes: int) -> int:
    """Threads that encode long texts: each process keeps a core for its event loop where there are enough."""
    return max(1, len(os.sched_getaffinity(0)) // processes - 1)


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
