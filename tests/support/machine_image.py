"""A small image of this machine's own programs: a shell, coreutils, git and Python, with what they need."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

from sandlot.sandbox.host_python import host_python

PROGRAMS = (
    "sh", "bash", "env", "cat", "cp", "mv", "rm", "ln", "ls", "mkdir", "mktemp", "chmod", "chown", "touch",
    "readlink", "stat", "id", "printf", "sort", "comm", "cut", "wc", "head", "tail", "tr", "tee", "dirname",
    "basename", "true", "false", "test", "sleep", "date", "uname", "find", "xargs", "sed", "grep", "awk", "diff",
    "git",
)  # fmt: skip
_LEFT_OUT = ("__pycache__", "test", "idlelib", "ensurepip", "lib2to3", "tkinter", "pydoc_data", "site-packages",
             "dist-packages", "config-")  # fmt: skip


@cache
def machine_layer() -> bytes:
    """The layer as an uncompressed tar; `python`, `python3` are on its PATH."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("bin", "sbin", "lib", "lib64"):
            if (link := Path("/", name)).is_symlink():
                _link(tar, name, os.readlink(link))
        python = Path(host_python()).resolve()
        stdlib = Path(_said(str(python), "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"))
        git_core = Path(_said("git", "--exec-path"))
        programs = {found for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))}
        modules = [str(path) for path in (stdlib / "lib-dynload").glob("*.so")]
        for path in sorted({*programs, str(python), *_libraries([*programs, str(python), *modules])}):
            _file(tar, Path(path))
        tar.add(stdlib, arcname=str(stdlib)[1:], filter=_slim)
        for name in ("git-upload-pack", "git-sh-setup", "git-sh-i18n", "git"):
            _file(tar, git_core / name)
        for name in ("python", "python3"):
            _link(tar, f"usr/local/bin/{name}", str(python))
        os_release = b"ID=test\n"
        info = tarfile.TarInfo("etc/os-release")
        info.size = len(os_release)
        tar.addfile(info, io.BytesIO(os_release))
    return buffer.getvalue()


def environment(tar: tarfile.TarFile, place: str, packages: Path) -> None:
    """A virtual environment at `place` of the image, with the packages of a directory."""
    python = Path(host_python()).resolve()
    version = _said(str(python), "-c", "import sys; print('python%d.%d' % sys.version_info[:2])")
    config = f"home = {python.parent}\ninclude-system-site-packages = false\n".encode()
    info = tarfile.TarInfo(f"{place}/pyvenv.cfg")
    info.size = len(config)
    tar.addfile(info, io.BytesIO(config))
    for name in ("python", "python3"):
        _link(tar, f"{place}/bin/{name}", str(python))
    tar.add(packages, arcname=f"{place}/lib/{version}/site-packages", filter=_slim_packages)


def _libraries(binaries: list[str]) -> set[str]:
    """The shared libraries and the loader of programs, as `ldd` tells them."""
    said = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", said))


def _file(tar: tarfile.TarFile, path: Path) -> None:
    """A program or library under its name, in the place where its directory really is; links become files."""
    info = tarfile.TarInfo(f"{path.parent.resolve()}/{path.name}"[1:])
    data = path.read_bytes()
    info.size, info.mode = len(data), 0o755
    tar.addfile(info, io.BytesIO(data))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _slim(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name.startswith(_LEFT_OUT) and member.isdir() else member


def _slim_packages(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name == "__pycache__" else member


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
