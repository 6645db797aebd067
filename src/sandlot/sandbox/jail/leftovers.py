"""Removing what dead sandboxes and runs left: limit groups and files. Their processes died with them."""

from __future__ import annotations

import os

from sandlot.sandbox.jail import cgroups, tree


def remove_sandbox(directory: str) -> None:
    """Remove the limit groups and files of a dead sandbox."""
    cgroups.remove_listed(os.path.join(directory, "groups"))
    tree.remove(directory)


def remove_run(run: str) -> int:
    """Remove all that a dead run left; how many sandboxes that were."""
    removed = 0
    for name in os.listdir(run) if os.path.isdir(run) else ():
        directory = os.path.join(run, name)
        if os.path.isdir(os.path.join(directory, "upper")):
            remove_sandbox(directory)
            removed += 1
    remove_sandbox(run)
    return removed
