"""Secrets that open a session. With several worker processes a key also says which of them has the session."""

from __future__ import annotations

import hashlib
import re
import secrets

_PREFIX = "sk-sandlot-"
_WORKER = re.compile(rb"sk-sandlot-w(\d{1,4})-")


def new_key(worker: int | None = None) -> str:
    """A key that nobody can guess."""
    mark = "" if worker is None else f"w{worker}-"
    return f"{_PREFIX}{mark}{secrets.token_urlsafe(32)}"


def worker_named(text: bytes) -> int | None:
    """The worker that the first key in some bytes names. It says where to ask, and proves nothing."""
    found = _WORKER.search(text)
    return int(found[1]) if found else None


def key_digest(api_key: str) -> bytes:
    """What keys are looked up by, so that a comparison tells nothing by its time."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).digest()
