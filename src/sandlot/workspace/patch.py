"""The agent's work as a patch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """`diff` is `git diff --binary` of the final working tree against the base commit, byte for byte.

    `tree` is the git tree id of the final state, which applying `diff` on the base must reproduce. `files` are the
    changed paths; `omitted` untracked binaries left out because the patch would exceed the size cap, biggest first.
    """

    diff: bytes
    tree: str
    files: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.diff.strip()
