"""Removing what dead sandboxes and runs left: limit groups and files. Their processes died with them."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from sandlot.sandbox.jail import cgroups, tree


def remove_sandbox(directory: str) -> None:
    """Remove the limit groups and files of a dead sandbox."""
    with suppress(OSError, ValueError, KeyError), open(os.path.join(directory, "about.json")) as file:
        cgroups.remove(json.load(file)["groups"])
    tree.remove(directory)


def remove_run(run: str) -> int:
    """Remove all that a dead run left; how many sandboxes that were."""
    removed = 0
    for name in os.listdir(run) if os.path.isdir(run) else ():
        directory = os.path.join(run, name)
        if any(os.path.exists(os.path.join(directory, mark)) for mark in ("about.json", "upper")):
            remove_sandbox(directory)
            removed += 1
    cgroups.remove_listed(os.path.join(run, "groups"))
    tree.remove(run)
    return removed
