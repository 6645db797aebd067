"""Which limit groups this machine lets us use, found by making one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandlot.sandbox.base import Limits
from sandlot.sandbox.jail import cgroups, wire


@dataclass(frozen=True)
class Tier:
    """How limits are enforced: `cgroup-v2`, `cgroup-v1`, or `rlimits` with a watch over memory.

    `parents`: the directory below which groups are made, by controller ("" for version 2).
    """

    name: str
    parents: Mapping[str, Path] = field(default_factory=dict)

    def groups(self, identity: str, limits: Limits) -> dict[str, str]:
        """The groups of one sandbox: controller → directory."""
        wanted = {c: p for c, p in self.parents.items() if c != "cpu" or limits.cpu is not None}
        return {controller: str(parent / identity) for controller, parent in wanted.items()}

    def below(self, name: str) -> Tier:
        """The same tier, with groups made below a group `name` of its own."""
        return Tier(self.name, {controller: parent / name for controller, parent in self.parents.items()})

    def facts(self, limits: Limits) -> dict[str, Any]:
        """What enforces each limit."""
        grouped = bool(self.parents)
        cpu = "group" if "" in self.parents or "cpu" in self.parents else "affinity"
        return {
            "tier": self.name,
            "memory": "group" if grouped else "watch",
            "processes": "group" if grouped else "rlimit",
            "cpu": None if limits.cpu is None else cpu,
            "disk": "watch",
        }


RLIMITS = Tier("rlimits")


def detect() -> Tier:
    """The best tier that works here."""
    for candidate in (_version2(), _version1()):
        if candidate is not None and _works(candidate):
            return candidate
    return RLIMITS


def _version2() -> Tier | None:
    for mount_point, options, kind, _ in _mounts():
        if kind != "cgroup2" or "rw" not in options.split(","):
            continue
        # Controllers can be given on only from a group without processes: the root, or one delegated to us empty.
        with suppress(OSError):
            available = (mount_point / "cgroup.controllers").read_text().split()
            if not {"memory", "pids", "cpu"} <= set(available):
                continue
            (mount_point / "cgroup.subtree_control").write_text("+memory +pids +cpu")
            return Tier("cgroup-v2", {"": mount_point})
    return None


def _version1() -> Tier | None:
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    parents: dict[str, Path] = {}
    for mount_point, options, kind, root in _mounts():
        if kind != "cgroup":
            continue
        for controller in {"memory", "pids", "cpu"} & set(options.split(",")):
            below = os.path.relpath(own.get(controller, "/"), root)
            parents[controller] = mount_point if below.startswith("..") else mount_point / below
    return Tier("cgroup-v1", parents) if {"memory", "pids"} <= set(parents) else None


def _mounts() -> list[tuple[Path, str, str, str]]:
    """(mount point, mount and super options, type, root) of every limit group file system."""
    rows = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if tail[0] in ("cgroup", "cgroup2"):
            path = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])
            rows.append((Path(path), f"{fields[5]},{tail[2]}", tail[0], fields[3]))
    return rows


def _works(tier: Tier) -> bool:
    run = tier.below(f"sandlot-trial-{os.getpid()}-{secrets.token_hex(3)}")
    groups = run.groups("trial", Limits(cpu=1.0))
    parents = [str(path) for path in run.parents.values()]
    try:
        cgroups.make_parents(parents, os.devnull)
        wire.close_all(cgroups.create(groups, {"memory": 1 << 30, "processes": 64, "cpu": 1.0}).files())
    except OSError:
        return False
    finally:
        cgroups.remove([*groups.values(), *parents])
    return True
