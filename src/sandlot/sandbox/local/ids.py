"""Which ids a sandbox can have on this machine: a range of nobody's, the caller's subordinate ones, or the caller's."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

AGENT_ID = 1000
"""The agent's user id inside."""
BASE_ID = 0x53420000
"""First of the ids outside that a sandbox's ids are when root makes it; nobody on the machine has them."""
_COUNT = 65536
_HELPERS = {"uid": "newuidmap", "gid": "newgidmap"}

Rows = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Ids:
    """`users`: `range` where root and agent are two, `single` where they are one. The rest: see `jail.ids`."""

    users: str
    mapped_by: str
    uid: Rows
    gid: Rows
    agent_id: int = AGENT_ID
    helpers: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> int | None:
        """The id outside of root inside where files can be given to it from outside, else None."""
        return BASE_ID if self.mapped_by == "root" else None

    def outside(self) -> dict[str, int]:
        """The ids outside of the users inside."""
        inside = {"root": 0 if self.users == "range" else AGENT_ID, "agent": AGENT_ID}
        return {
            user: next(there + number - here for here, there, count in self.uid if here <= number < here + count)
            for user, number in inside.items()
        }


def candidates() -> Iterator[Ids]:
    """What may work here, best first."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        yield Ids("range", "root", ((0, BASE_ID, _COUNT),), ((0, BASE_ID, _COUNT),))
    elif (found := _subordinate(uid, gid)) is not None:
        yield found
    yield Ids("single", "self", ((AGENT_ID, uid, 1),), ((AGENT_ID, gid, 1),))


def _subordinate(uid: int, gid: int) -> Ids | None:
    """Root inside is the caller, all others are its subordinate ids."""
    helpers = {kind: shutil.which(name) for kind, name in _HELPERS.items()}
    uids, gids = (_range(Path(f"/etc/sub{kind}"), uid) for kind in ("uid", "gid"))
    if uids is None or gids is None or helpers["uid"] is None or helpers["gid"] is None:
        return None
    found = {kind: path for kind, path in helpers.items() if path is not None}
    return Ids("range", "helper", ((0, uid, 1), (1, *uids)), ((0, gid, 1), (1, *gids)), helpers=found)


def _range(path: Path, uid: int) -> tuple[int, int] | None:
    """(first, count) of a user's subordinate ids, if they are enough."""
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if name in names and first.isdigit() and count.isdigit() and int(count) > AGENT_ID:
            return int(first), min(int(count), _COUNT - 1)
    return None
