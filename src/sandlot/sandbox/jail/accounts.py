"""The two users of a sandbox, their homes and the work directory, made inside the sandbox at boot."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Any

_ROOT = "root:x:0:0:root:/root:/bin/sh"
_NOBODY = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"


def merged(text: str, agent: str, always: tuple[str, ...]) -> str:
    """`text` (passwd or group) with the agent's line first, so that its id gets its name, plus what must exist."""
    lines = [line for line in text.splitlines() if line.strip()]
    names = {line.split(":", 1)[0] for line in lines}
    missing = [line for line in always if line.split(":", 1)[0] not in names]
    if agent in lines:
        return "\n".join([*lines, *missing]) + "\n"
    kept = [line for line in lines if not line.startswith("agent:")]
    return "\n".join([agent, *kept, *missing]) + "\n"


def accounts(uid: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """(file of /etc, the agent's line, lines that must exist) of the account files."""
    return [
        ("passwd", f"agent:x:{uid}:{uid}:agent:/home/agent:/bin/sh", (_ROOT, _NOBODY)),
        ("group", f"agent:x:{uid}:", ("root:x:0:", "nogroup:x:65534:")),
    ]


def prepare(spec: dict[str, Any]) -> None:
    """Make users, homes and the work directory; all but the last are there in an image that was prepared."""
    uid = spec["agent_id"]
    wanted: list[tuple[str, int | None, int]] = [(spec["workdir"], uid, 0o755)]
    if not spec["has_accounts"]:
        os.makedirs("/etc", 0o755, exist_ok=True)
        etc = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name, agent, always in accounts(uid):
            update(etc, name, agent, always)
        os.close(etc)
        wanted += [("/root", None, 0o700), ("/home/agent", uid, 0o755)]
    for path, owner, mode in wanted:
        made = _make(path, mode)
        if owner is not None and (made or os.stat(path).st_uid != owner):
            with suppress(OSError):
                os.chown(path, owner, owner)


def _make(path: str, mode: int) -> bool:
    try:
        os.makedirs(os.path.realpath(path), 0o755)
    except FileExistsError:
        return False
    os.chmod(path, mode)
    return True


def update(etc: int, name: str, agent: str, always: tuple[str, ...]) -> bool:
    """Rewrite an account file of the open directory `etc` when it lacks something; whether it did.

    An odd one (link out, FIFO) is replaced.
    """
    text = ""
    with suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=etc)
        with open(fd, encoding="utf-8", errors="surrogateescape") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                text = file.read(1 << 20)
    wanted = merged(text, agent, always)
    if wanted == text:
        return False
    temporary = f"{name}.sandlot"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=etc)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=etc)
    with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(fd, 0o644)
        file.write(wanted)
    os.replace(temporary, name, src_dir_fd=etc, dst_dir_fd=etc)
    return True
