"""Write docs/captures.md: what the recorded sessions of real agent CLIs are to the gateway."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.captures import load_capture  # noqa: E402
from support.replay import replay, shape_of  # noqa: E402
from support.scenarios import SCENARIOS  # noqa: E402

PAGE = ROOT / "docs" / "captures.md"
HEAD = """# Recorded agents

Sessions of real agent CLIs were recorded against a scripted server. The tests replay every one of them request by
request, as if the recorded answers had been sampled by the gateway, and compare what continuity makes of it with what
happened in the session. A *conversation* begins without an earlier turn in its history; a *branch* is a line of turns
from such a beginning to a last turn, and gives one training sample. A *fork* is a request that does not simply go on
from the newest turn; its reason is kept with the turn. Requests that were refused make no turn.

This page is written by `tools/capture_table.py`.

| Agent | Session | What happens | Requests | Conversations | Branches | Forks (request: reason) |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page as it should be."""
    rows = []
    for (cli, name), scenario in sorted(SCENARIOS.items()):
        shape = shape_of(replay(load_capture(cli)[name]))
        forks = "; ".join(f"{number}: {_short(reason)}" for number, reason in shape.forks)
        counts = f"{shape.requests} | {shape.conversations} | {shape.branches}"
        rows.append(f"| {cli} | {name} | {scenario.story} | {counts} | {forks} |\n")
    return HEAD + "".join(rows)


def _short(reason: str) -> str:
    """A reason without the excerpt of the message, whose prose is replaced in the recordings."""
    return re.sub(r" differs: .*", " differs", reason)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
