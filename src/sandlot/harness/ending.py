"""What the end of an agent CLI means, as far as it is the same for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from sandlot.errors import FailureKind
from sandlot.sandbox import ExecResult

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OVERFLOW = ("prompt is too long", "maximum context length", "context_length_exceeded", "model's context window")
# The gateway's words for a spent or sealed session; the CLIs' own for an answer cut at its token limit.
_CUT = ("output token limit", "output token maximum", "reason: max_output_tokens")
_BUDGET = ("budget of this session", "session is sealed", *_CUT)


def classify(result: ExecResult, words: str) -> tuple[FailureKind | None, str]:
    """The failure kind and its detail; `words` is what the CLI said last about why it stopped.

    The gateway's own record of the session is the better witness; this is what can be seen from outside.
    """
    if result.timed_out:
        return FailureKind.AGENT_TIMEOUT, f"killed after {result.duration:.0f} s"
    if result.out_of_memory:
        return FailureKind.AGENT_ERROR, "killed: out of memory"
    if result.ok:
        return None, ""
    how = f"exit code {result.exit_code}" if result.exit_code is not None else "killed by a signal"
    detail = f"{how}: {words}" if words else how
    lowered = words.lower()
    if any(mark in lowered for mark in _OVERFLOW):
        return FailureKind.CONTEXT_OVERFLOW, detail
    if any(mark in lowered for mark in _BUDGET):
        return FailureKind.BUDGET, detail
    return FailureKind.AGENT_ERROR, detail


def last_words(text: str, limit: int = 400) -> str:
    """The last lines of an output on one line without its colours, cut at `limit` characters from the end."""
    joined = " | ".join(line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip())
    return joined if len(joined) <= limit else "…" + joined[-limit:]


def events_backwards(output: bytes, key: str) -> Iterator[dict[str, Any]]:
    """The JSON objects with a text `key` somewhere among the lines of an output, the last one first.

    Whoever runs inside can write there, too.
    """
    mark = f'"{key}"'.encode()
    for line in reversed(output.splitlines()):
        if mark in line:
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event
