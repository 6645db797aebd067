"""Limit groups for a plain user, from the user's own systemd: sandboxes are forked inside a scope delegated to us.

A plain user may move processes only within groups of its own, so the zygote itself must start in the scope.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def environment() -> dict[str, str]:
    """What `systemd-run` needs to reach the user's manager."""
    names = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    return {name: os.environ[name] for name in names if name in os.environ}


def refusal() -> str | None:
    """Why no scope can be asked for here, None when it can."""
    if os.geteuid() == 0:
        return "root makes limit groups itself"
    if shutil.which("systemd-run") is None:
        return "systemd-run is not installed"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime is None:
        return "XDG_RUNTIME_DIR is not set: log in by a session of systemd-logind, or set it to /run/user/$(id -u)"
    if not any((Path(runtime) / name).exists() for name in ("systemd/private", "bus")):
        return "no user manager runs: start it by `loginctl enable-linger`"
    return None


def scope(unit: str) -> list[str]:
    """The command line that runs what follows in a new delegated scope, with an empty environment."""
    systemd_run, env = (shutil.which(name) or name for name in ("systemd-run", "env"))
    how = ["--user", "--scope", "--quiet", "--collect", f"--unit={unit}", "--property=Delegate=yes"]
    return [systemd_run, *how, "--", env, "-i"]
