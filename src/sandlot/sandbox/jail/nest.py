"""All of a sandbox that does not depend on what is asked for: its namespaces, and an init that waits in them.

Made ahead by a spare keeper, so that a boot only mounts and goes on.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from sandlot.sandbox.jail import ids as id_maps
from sandlot.sandbox.jail import init, mounts, syscalls, wire
from sandlot.sandbox.jail.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)

_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP


class Nest:
    """`init` is the process number of the waiting init, a child of this process; `userns` its open user namespace
    where this process is outside of it, else None. `channel` leads to init."""

    def __init__(self, ids: dict[str, Any]) -> None:
        by_root = ids["mapped_by"] == "root"
        if not by_root:
            id_maps.enter(ids)
        syscalls.unshare(CLONE_NEWNS)
        mounts.make_private()
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # init's parent ends as soon as init lives
        self.channel, theirs = wire.packet_pair()
        self.userns: int | None = None
        between = os.fork()
        if between == 0:
            _bear(ids, theirs, CLONE_NEWUSER if by_root else 0)
        theirs.close()
        try:
            if by_root:
                self._next_answer()
                self.userns = id_maps.map_child(between, ids)
                wire.send_packet(self.channel, {})
            self.init = int(self._next_answer()["init"])
        except BaseException:
            self.channel.close()
            raise
        finally:
            os.waitpid(between, 0)

    def _next_answer(self) -> dict[str, Any]:
        answer, _ = wire.receive_packet(self.channel)
        if answer is None or "error" in answer:
            answer = answer or {}
            raise OSError(answer.get("errno"), answer.get("error", "a helper process was killed"))
        return answer

    def enter(self) -> None:
        """Give up the rights of this process outside, once init has all it needs."""
        self.channel.close()
        if self.userns is not None:
            syscalls.setns(self.userns, CLONE_NEWUSER)
            os.close(self.userns)

    def close(self) -> None:
        """Let go of an init that was not needed."""
        self.channel.close()
        if self.userns is not None:
            os.close(self.userns)
        os.waitpid(self.init, 0)


def _bear(ids: dict[str, Any], channel: socket.socket, userns: int) -> None:
    """Make the namespaces and fork init into them; never returns."""
    try:
        wire.close_all_but({0, 1, 2, channel.fileno()})
        syscalls.unshare(_NAMESPACES | userns)
        if userns:
            wire.send_packet(channel, {})
            if wire.receive_packet(channel)[0] is None:
                return
        child = os.fork()
        if child == 0:
            init.main(ids, channel)
        wire.send_packet(channel, {"init": child})
    except OSError as error:
        with suppress(OSError):
            wire.send_packet(channel, {"error": str(error), "errno": error.errno})
    finally:
        os._exit(0)
