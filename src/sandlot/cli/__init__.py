"""The command line: one file per command, each a thin layer over the rooms."""

from __future__ import annotations


def main() -> None:
    """Entry point of `sandlot`."""
    from sandlot.cli.app import run

    run()
