"""Another kernel, with limit groups of version 2: user-mode Linux on this machine's own files, read-only."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sandlot

PLAIN_USER = 12345
_GROUPS = "/sys/fs/cgroup"
_INIT = """#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t cgroup2 cg /sys/fs/cgroup
mount -t devtmpfs dev /dev; mkdir -p /dev/pts /dev/shm; mount -t devpts pts /dev/pts
for path in /run /dev/shm; do mount -t tmpfs tmpfs $path; done
chmod 666 /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/dev/shm TMPDIR=/dev/shm
export XDG_CACHE_HOME=/dev/shm/cache PYTHONPATH={paths}
mkdir -m 777 /dev/shm/cache
python3 -c 'import ctypes, os, sys
os._exit(ctypes.CDLL(None).syscall({finit_module}, os.open(sys.argv[1], 0), b"", 0) != 0)' {overlay} || echo no overlay
{commands}
sync
echo o > /proc/sysrq-trigger
sleep 60
"""
# A user's manager as logind would start it, and beside it the session of that user.
_AS_USER = """
mkdir -p /run/systemd/system /run/user/{user}/systemd
chown -R {user}:{user} /run/user/{user}; chmod 700 /run/user/{user}
echo '+memory +pids +cpu' > {groups}/cgroup.subtree_control
mkdir {groups}/user; echo '+memory +pids +cpu' > {groups}/user/cgroup.subtree_control
mkdir {groups}/user/session {groups}/user/manager; chown -R {user}:{user} {groups}/user
export XDG_RUNTIME_DIR=/run/user/{user}
become="setpriv --reuid {user} --regid {user} --clear-groups"
(echo 0 > {groups}/user/manager/cgroup.procs; exec $become /lib/systemd/systemd --user --log-level=warning) &
for i in $(seq 300); do [ -S $XDG_RUNTIME_DIR/systemd/private ] && break; sleep 0.1; done
(echo 0 > {groups}/user/session/cgroup.procs; exec $become {command})
"""


def run(directory: Path, script: Path, *, plain_user: bool) -> dict[str, Any]:
    """Run a script of ours there with this machine's /usr/bin/python3; what it printed as a line of JSON."""
    kernel = shutil.which("linux.uml")
    if kernel is None:
        pytest.skip("user-mode Linux is not installed")
    if plain_user and not (Path("/lib/systemd/systemd").exists() and shutil.which("systemd-run")):
        pytest.skip("systemd is not installed")
    overlay = next(Path("/usr/lib/uml/modules").glob("*/kernel/fs/overlayfs/overlay.ko"))
    paths = [str(Path(sandlot.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    command = f"/usr/bin/python3 -B {shlex.quote(str(script))}"
    commands = _AS_USER.format(user=PLAIN_USER, groups=_GROUPS, command=command) if plain_user else command
    init = directory / "init"
    finit_module = {"x86_64": 313, "aarch64": 273}[os.uname().machine]
    text = _INIT.format(paths=":".join(paths), finit_module=finit_module, overlay=overlay, commands=commands)
    init.write_text(text)
    init.chmod(0o755)
    options = ["mem=1G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}", "quiet"]
    done = subprocess.run(
        [kernel, *options, "con=null", "con0=null,fd:1", "random.trust_cpu=on"],
        env={**os.environ, "TMPDIR": "/dev/shm"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines and "ModuleNotFoundError" in done.stdout:
        pytest.skip("/usr/bin/python3 cannot import what Sandlot needs")
    assert lines, done.stdout[-3000:] + done.stderr[-1000:]
    return dict(json.loads(lines[-1]))
