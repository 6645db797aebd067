"""What every backend refuses, in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.base import AGENT_USER, SandboxSpec

_HOMES = {"root": "/root", AGENT_USER: "/home/agent"}


def check_paths(spec: SandboxSpec) -> None:
    """Refuse layers and a workdir that no sandbox on this machine can have: `SandboxUnavailableError`."""
    for layer in spec.layers:
        if not layer.source.is_dir():
            raise SandboxUnavailableError(f"the layer {layer.source} is not a directory")
        if not layer.mount_point.startswith("/"):
            raise SandboxUnavailableError(f"the mount point {layer.mount_point!r} is not an absolute path")
    check_workdir(spec)


def check_workdir(spec: SandboxSpec) -> None:
    """Refuse a workdir that is not absolute."""
    if not spec.workdir.startswith("/"):
        raise SandboxUnavailableError(f"the workdir {spec.workdir!r} is not an absolute path")


def home_of(user: str) -> str:
    """The home of a user inside; `SandboxError` for one that no sandbox has."""
    if user not in _HOMES:
        raise SandboxError(f"no user {user!r} in a sandbox; there are: {AGENT_USER}, root", retryable=False)
    return _HOMES[user]


def argv_of(command: Sequence[str] | str, cwd: str, env: Mapping[str, str]) -> list[str]:
    """The words of a command, a string being one for the shell. `SandboxError` for what no kernel would start."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv:
        raise SandboxError("the command is empty; name a program", retryable=False)
    if any("\0" in text for pair in ((*argv, cwd), *env.items()) for text in pair):
        raise SandboxError("a command, its directory and environment cannot hold a NUL byte", retryable=False)
    return argv
