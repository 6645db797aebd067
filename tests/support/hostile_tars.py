"""Hostile archives from a seed: names and links that try to lead out, lies about sizes, odd types, damage."""

from __future__ import annotations

import io
import tarfile
from random import Random

NAMES = ["a", "A", "b", "l", "d", "..", ".", "", "é", "É", " ", "\udcff", "x" * 120, "kept", "planted", "con", "a\nb"]
WHITEOUTS = [".wh.a", ".wh..wh..opq", ".wh.", ".wh..", ".wh...", ".wh.d", ".wh..wh.plnk"]
TYPES = [
    *(tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE),
    *(tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"Z", b"V", b"D"),
]
_LIKELY = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
_PAX = ["path", "linkpath", "size", "mtime", "uid", "GNU.sparse.map", "GNU.sparse.major", "GNU.sparse.name", "SCHILY.x"]


def make(random: Random, outside: str, *, layer: bool) -> bytes:
    """One archive; `outside` is a directory that it must not reach, `layer` adds what only image layers can say."""
    buffer = io.BytesIO()
    kind = random.choice([tarfile.GNU_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    shared = _pax(random, outside) if random.random() < 0.05 else None
    with tarfile.open(fileobj=buffer, mode="w", format=kind, pax_headers=shared, errors="surrogateescape") as archive:
        for _ in range(random.randrange(1, 7)):
            _add(archive, random, outside, layer=layer)
    data = bytearray(buffer.getvalue())
    if random.random() < 0.3:
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(min(len(data), 2048))] ^= 1 << random.randrange(8)
    if random.random() < 0.15:
        del data[random.randrange(len(data)) :]
    return bytes(data)


def _add(archive: tarfile.TarFile, random: Random, outside: str, *, layer: bool) -> None:
    info = tarfile.TarInfo(_name(random, outside, layer=layer))
    info.type = random.choice(_LIKELY if random.random() < 0.8 else TYPES)
    info.mode = random.choice([0o644, 0o755, 0, 0o777, 0o4755, 0o2770, 0o7777])
    info.uid = info.gid = random.choice([0, 0, 1000, 65534, 1 << 20])
    info.linkname = _target(random, outside)
    if archive.format == tarfile.PAX_FORMAT and random.random() < 0.2:
        info.pax_headers = _pax(random, outside)
    data = random.randbytes(random.randrange(30)) if info.isreg() else b""
    info.size = len(data) if random.random() < 0.9 else random.choice([0, 7, 1 << 33, 10**6])
    archive.addfile(info, None if info.size != len(data) else io.BytesIO(data))
    if info.size != len(data):  # a lie
        assert archive.fileobj is not None
        archive.fileobj.write(data.ljust(512, b"\0"))


def _name(random: Random, outside: str, *, layer: bool) -> str:
    if random.random() < 0.05:
        return random.choice(
            [f"{outside}/kept", outside, "/", "/etc/x", "../" * 40 + outside, "d/" * 600 + "e", "x" * 300]
        )
    names = NAMES + WHITEOUTS if layer else NAMES
    return random.choice(["", "", "", "/", "./"]) + "/".join(random.choices(names, k=random.randrange(1, 5)))


def _target(random: Random, outside: str) -> str:
    near = ["..", ".", "/", "a", "l", "d", "l/kept", "planted/kept", "../outside", "../outside/kept", "/proc/self/cwd"]
    return random.choice(
        [*near, outside, f"{outside}/kept", "../" * 30 + outside.lstrip("/"), "y" * 150, "/proc/self/fd/0"]
    )


def _pax(random: Random, outside: str) -> dict[str, str]:
    values = [outside, f"{outside}/kept", "../outside/kept", "-1", "99999999999999", "0,1,2", "1.0", "nan", "é"]
    return {random.choice(_PAX): random.choice(values) for _ in range(random.randrange(1, 3))}
