"""Request bodies that clients send packed."""

from __future__ import annotations

import zlib

_CODECS = {"gzip": "gzip", "x-gzip": "gzip", "br": "brotli", "zstd": "zstd"}
"""How `Content-Encoding` and Arrow call the same."""


def unpacked(raw: bytes, packing: str, most: int) -> bytes:
    """At most so many first bytes of what a body holds. `ValueError` where it is not packed as `packing` says."""
    packing = packing.strip().lower()
    try:
        if packing == "deflate":
            stream = zlib.decompressobj()
            body = stream.decompress(raw, most)
            if not stream.eof and len(body) < most:
                raise ValueError("it ends too early")
            return body
        if (codec := _CODECS.get(packing)) is None:
            raise ValueError(f"{packing!r} is unknown; send it plain or packed with gzip, deflate, br or zstd")
        import pyarrow as pa  # takes a while, and hardly any client packs

        with pa.CompressedInputStream(pa.BufferReader(raw), codec) as packed:
            return bytes(packed.read(most))
    except (OSError, zlib.error) as error:
        raise ValueError(str(error)) from error
