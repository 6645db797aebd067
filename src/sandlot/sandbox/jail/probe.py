"""Short trials that the doctor and the backend's start run in a forked child, so that they leave no trace."""

from __future__ import annotations

import os
import socket
from typing import Any

from sandlot.sandbox.jail import ids, mounts, nest, syscalls, wire
from sandlot.sandbox.jail.syscalls import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, MS_NODEV


def main(sealed: int, reply: int) -> None:
    """Run the trial `what` and answer with its error, None when it works."""
    body, channel = wire.unseal(sealed), socket.socket(fileno=reply)
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
    if body["ids"]["mapped_by"] != "root":
        ids.enter(body["ids"])
        kind = ",userxattr"
    syscalls.unshare(CLONE_NEWNS)
    mounts.make_private()
    os.chdir(body["directory"])
    syscalls.mount("overlay", "root", "overlay", MS_NODEV, f"lowerdir=lower,upperdir=upper,workdir=work{kind}")
    with open("root/file", "w") as file:
        file.write("changed")


def _ids(body: dict[str, Any]) -> None:
    """Whether ids can be mapped so."""
    nest.Nest(body["ids"]).close()


_TRIALS = {"namespaces": _namespaces, "ids": _ids, "overlay": _overlay}
