"""The image `host` for containers: the skeleton that `local` boots, with the machine's own /usr mounted on it."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from sandlot.sandbox.base import Layer
from sandlot.sandbox.local.image import make_skeleton


def skeleton(agent_id: int) -> tuple[bytes, tuple[Layer, ...]]:
    """An archive of the root, the same each time, and what is to be mounted on it. Blocking: run it in a thread."""

    def clean(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = agent_id if member.name.startswith("home/agent") else 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        binds = make_skeleton(root, None, agent_id)
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(root.iterdir()):
                archive.add(path, path.name, filter=clean)
    return buffer.getvalue(), tuple(Layer(Path(source), target) for source, target in binds)
