"""The vocabulary file that gpt-oss's encoder would fetch, written from the checkpoint's own tokenizer instead."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"


@contextmanager
def vocabulary_at_hand(vocabulary: Mapping[str, int]) -> Iterator[None]:
    """While this lasts the encoder finds its vocabulary, by the tokens of a byte-level tokenizer and their ids.

    A file that somebody has put in place is left alone. The encoder checks what it reads by a hash.
    """
    if _VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="sandlot-vocabulary-") as directory:
        (Path(directory) / _FILE).write_bytes(_tiktoken(vocabulary))
        os.environ[_VARIABLE] = directory
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def _tiktoken(vocabulary: Mapping[str, int]) -> bytes:
    """A line for each token: its bytes in base 64, its rank."""
    byte_of = _bytes_by_letter()
    lines: list[bytes] = []
    for token, rank in sorted(vocabulary.items(), key=lambda entry: entry[1]):
        if all(letter in byte_of for letter in token):
            lines.append(base64.b64encode(bytes(map(byte_of.__getitem__, token))) + b" %d\n" % rank)
    return b"".join(lines)


def _bytes_by_letter() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes are themselves, the others come after them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
