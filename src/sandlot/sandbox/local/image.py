"""The `host` image: a skeleton root with the few files of /etc that programs need; /usr is mounted read-only."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from sandlot.sandbox.jail import accounts

_TREES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_TREES = ("alternatives", "ssl/certs")
_ETC = (
    "bash.bashrc",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "services",
    "shells",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
_WRITTEN = {
    "hosts": "127.0.0.1 localhost sandlot\n::1 localhost ip6-localhost ip6-loopback\n",
    "hostname": "sandlot\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    "resolv.conf": "",
}


def make_skeleton(root: Path, owner: int | None, agent_id: int) -> list[tuple[str, str]]:
    """Build the skeleton at `root`; the (source, path inside) of what is to be mounted read-only on it.

    All of it is owned by `owner` if given, the agent's home and the usual work directory by the agent's id above that.
    They are there already, so that a boot changes nothing. What not everybody may read is left out.
    """
    binds: list[tuple[str, str]] = []
    root.mkdir(mode=0o755)
    for name in _TREES:
        source = Path("/") / name
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (root / name).mkdir()
            binds.append((str(source), f"/{name}"))
    for name in (
        "etc",
        "root",
        "home/agent",
        "opt",
        "proc",
        "dev",
        "sys",
        "run",
        "srv",
        "tmp",
        "var/tmp",
        "var/lib",
        "mnt",
        "workspace",
    ):
        (root / name).mkdir(parents=True)
    (root / "var/run").symlink_to("/run")
    for name in _ETC:
        _copy(Path("/etc") / name, root / "etc" / name)
    for name in _ETC_TREES:
        if (Path("/etc") / name).is_dir():
            (root / "etc" / name).mkdir(parents=True, exist_ok=True)
            binds.append((f"/etc/{name}", f"/etc/{name}"))
    for name, text in _WRITTEN.items():
        (root / "etc" / name).write_text(text)
    for name, agent, always in accounts.accounts(agent_id):
        (root / "etc" / name).write_text(accounts.merged("", agent, always))
    if owner is not None:
        for directory, directories, files in os.walk(root):
            for name in (".", *directories, *files):
                os.chown(os.path.join(directory, name), owner, owner, follow_symlinks=False)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    if owner is not None:
        for name in ("home/agent", "workspace"):
            os.chown(root / name, owner + agent_id, owner + agent_id)
    return binds


def _copy(source: Path, target: Path) -> None:
    """Copy what everybody may read; links stay links, except where they lead out of /usr and /etc."""
    with suppress(OSError):
        status = source.lstat()
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(status.st_mode):
            resolved = source.resolve()
            if str(resolved).startswith(("/usr/", "/etc/")) or not resolved.exists():
                target.symlink_to(os.readlink(source))
            elif resolved.is_file() and resolved.stat().st_mode & 0o004:
                shutil.copyfile(resolved, target)
        elif stat.S_ISDIR(status.st_mode) and status.st_mode & 0o005 == 0o005:
            target.mkdir(exist_ok=True)
            for entry in sorted(source.iterdir()):
                _copy(entry, target / entry.name)
        elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o004:
            shutil.copyfile(source, target)
            target.chmod(status.st_mode & 0o755)
