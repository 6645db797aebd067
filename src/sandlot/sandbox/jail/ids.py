"""User namespaces: which ids outside the ids of a sandbox are.

`ids` says who maps: `root` (a range that belongs to nobody on the machine), `helper` (the caller and its subordinate
ids, by newuidmap), or `self` (the caller's one id). Rows of a map are (first id inside, first id outside, count).
"""

from __future__ import annotations

import errno
import os
from typing import Any

from sandlot.sandbox.jail import syscalls
from sandlot.sandbox.jail.syscalls import CLONE_NEWUSER


def map_child(pid: int, ids: dict[str, Any]) -> int:
    """Map the ids of the new user namespace that `pid` is in, as its parent's root; the open namespace."""
    for name in ("uid", "gid"):
        syscalls.write_setting(f"/proc/{pid}/{name}_map", _text(ids[name]))
    return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def enter(ids: dict[str, Any]) -> None:
    """Move this process into a new user namespace, with all rights in it."""
    if ids["mapped_by"] == "self":
        syscalls.unshare(CLONE_NEWUSER)
        syscalls.write_setting("/proc/self/setgroups", "deny")
        for name in ("uid", "gid"):
            syscalls.write_setting(f"/proc/self/{name}_map", _text(ids[name]))
        return
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    outside = os.getpid()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(ready_write)
            os._exit(0 if os.read(ready_read, 1) and _map_by_helpers(outside, ids) else 1)
        finally:
            os._exit(1)
    os.close(ready_read)
    try:
        syscalls.unshare(CLONE_NEWUSER)
        os.write(ready_write, b"1")
    finally:
        os.close(ready_write)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise OSError(errno.EPERM, "newuidmap or newgidmap refuses the ids of /etc/subuid and /etc/subgid")


def _map_by_helpers(pid: int, ids: dict[str, Any]) -> bool:
    for name in ("uid", "gid"):
        argv = [ids["helpers"][name], str(pid), *(str(number) for row in ids[name] for number in row)]
        null = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1, 2)]
        child = os.posix_spawn(argv[0], argv, {}, file_actions=null)
        if os.waitpid(child, 0)[1]:
            return False
    return True


def _text(rows: list[list[int]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in rows)
