"""Short trials that the doctor and the backend's start run in a forked child, so that they leave no trace."""

from __future__ import annotations

import os
import socket
from typing import Any

from sandlot.sandbox.jail import keeper, mounts, syscalls, wire
from sandlot.sandbox.jail.syscalls import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, MS_NODEV


def main(body: dict[str, Any], channel: socket.socket) -> None:
    """Run the trial `what` and answer with its error, None when it works."""
    try:
        _TRIALS[body["what"]](body)
        wire.send_packet(channel, {"error": None})
    except OSError as error:
        wire.send_packet(channel, {"error": str(error), "errno": error.errno})


def _namespaces(_: dict[str, Any]) -> None:
    syscalls.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET)


def _overlay(body: dict[str, Any]) -> None:
    """Whether `directory` can hold the writable side of an overlay."""
    kind = ""
    if body["users"] == "range":
        syscalls.unshare(CLONE_NEWNS)
    else:
        uid, gid = os.geteuid(), os.getegid()
        syscalls.unshare(CLONE_NEWUSER | CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        kind = ",userxattr"
    mounts.make_private()
    os.chdir(body["directory"])
    syscalls.mount("overlay", "root", "overlay", MS_NODEV, f"lowerdir=lower,upperdir=upper,workdir=work{kind}")
    with open("root/file", "w") as file:
        file.write("changed")


def _range(body: dict[str, Any]) -> None:
    """Whether a range of ids can be mapped."""
    os.close(keeper.mapped_userns(body["base"]))


_TRIALS = {"namespaces": _namespaces, "range": _range, "overlay": _overlay}
