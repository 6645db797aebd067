"""Recorded requests of real agent CLIs: what they sent, turn by turn, and what they were answered.

Long prose is replaced by a mark with its hash and length, so equal texts are still equal.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

_DIRECTORY = Path(__file__).parent.parent / "captures"


def captured() -> list[str]:
    """All CLIs that were recorded."""
    return sorted(path.name.removesuffix(".json.gz") for path in _DIRECTORY.glob("*.json.gz"))


@cache
def load_capture(cli: str) -> dict[str, list[dict[str, Any]]]:
    """Turns of each recorded scenario of one CLI: `{meta, method, path, query, headers, body, our_reply}`."""
    raw: dict[str, list[dict[str, Any]]] = msgspec.json.decode(
        gzip.decompress((_DIRECTORY / f"{cli}.json.gz").read_bytes())
    )
    return raw


def headers_of(turn: dict[str, Any]) -> dict[str, str]:
    """Headers of a recorded request with lower-case names, as a wire wants them."""
    return {name.lower(): value for name, value in turn["headers"]}
