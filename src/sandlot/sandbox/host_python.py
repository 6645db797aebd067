"""The Python of the `host` image: the machine's own, or else the one that runs Sandlot."""

from __future__ import annotations

import os
import sys


def system_python() -> str | None:
    """The interpreter that the machine's own /usr has."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path
    return None


def host_python() -> str:
    """The interpreter of a `host` sandbox; where that is ours, `sys.base_prefix` must be one of its layers."""
    return system_python() or f"{sys.base_prefix}/bin/python3"
