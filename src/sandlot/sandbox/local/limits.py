"""Which limit groups this machine lets us use, found by making one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandlot.sandbox.base import Limits
from sandlot.sandbox.jail import cgroups, wire
from sandlot.sandbox.local import systemd


@dataclass(frozen=True)
class Tier:
    """How limits are enforced: `cgroup-v2`, `cgroup-v1`, `systemd`, or `rlimits` with a watch over memory.

    `parents`: the directory below which groups are made, by controller ("" for version 2). `cpu`: a group bounds it.
    """

    name: str
    parents: Mapping[str, Path] = field(default_factory=dict)
    cpu: bool = False

    def groups(self, identity: str, limits: Limits) -> dict[str, str]:
        """The groups of one sandbox: controller → directory."""
        wanted = {c: p for c, p in self.parents.items() if c != "cpu" or limits.cpu is not None}
        return {controller: str(parent / identity) for controller, parent in wanted.items()}

    def below(self, name: str) -> Tier:
        """The same tier, with groups made below a group `name` of its own."""
        return replace(self, parents={controller: parent / name for controller, parent in self.parents.items()})

    def facts(self, limits: Limits) -> dict[str, Any]:
        """What enforces each limit."""
        grouped = bool(self.parents)
        return {
            "tier": self.name,
            "memory": "group" if grouped else "watch",
            "processes": "group" if grouped else "rlimit",
            "cpu": None if limits.cpu is None else "group" if self.cpu else "affinity",
            "disk": "watch",
        }


RLIMITS = Tier("rlimits")


def detect() -> Tier:
    """The best tier that works here for this process; a plain user may get `systemd` instead of the last."""
    for candidate in (_version2(), _version1()):
        if candidate is not None and _works(candidate):
            return candidate
    return RLIMITS


def unified() -> Path | None:
    """Where limit groups of version 2 are mounted."""
    return next(
        (point for point, options, kind, _ in _mounts() if kind == "cgroup2" and "rw" in options.split(",")), None
    )


def systemd_tier(path: str, controllers: Sequence[str]) -> Tier:
    """The tier of a scope that the user's systemd gave to us."""
    return Tier("systemd", {"": Path(path)}, "cpu" in controllers)


def why_not_groups() -> str:
    """Why there are no limit groups here, for a person who wants them."""
    if os.geteuid() == 0:
        return "mount cgroups writable (in a container: --cgroupns=host or a delegated group) with memory and pids"
    if unified() is None:
        return "run as root, or boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1) to get a scope of systemd"
    return f"run as root, or get a scope of systemd: {systemd.refusal() or 'systemd-run gave none'}"


def _version2() -> Tier | None:
    mount_point = unified()
    if mount_point is None:
        return None
    # Controllers can be given on only from a group without processes: the root, or one delegated to us empty.
    try:
        return Tier("cgroup-v2", {"": mount_point}, "cpu" in cgroups.give_on(str(mount_point)))
    except OSError:
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
    return Tier("cgroup-v1", parents, "cpu" in parents) if {"memory", "pids"} <= set(parents) else None


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
