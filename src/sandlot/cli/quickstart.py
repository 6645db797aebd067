"""`sandlot quickstart`: the whole loop on this machine, with the embedded model and the bundled tasks."""

from __future__ import annotations

from typing import Any

from sandlot.cli.common import JsonFlag
from sandlot.cli.rollout import (
    Attempts,
    Concurrency,
    Engine,
    Harnesses,
    Kind,
    Model,
    Only,
    Out,
    Seconds,
    Temperature,
    Tokens,
    Turns,
    run,
)
from sandlot.config import load_config

SMALL = {"turns": 4, "max_tokens": 160, "wall_clock": 600.0}
"""What bounds an episode of the small embedded model, which would otherwise ramble for hours."""


def command(
    harness: Harnesses = None,
    engine: Engine = None,
    engine_kind: Kind = None,
    model: Model = None,
    attempts: Attempts = None,
    only: Only = None,
    concurrency: Concurrency = None,
    max_turns: Turns = None,
    max_tokens: Tokens = None,
    wall_clock: Seconds = None,
    temperature: Temperature = None,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Real agents on the bundled tasks: sampled by a real model, graded apart, turned into audited samples.

    The embedded model has 135M parameters and solves next to nothing; `--engine URL --model DIR` takes a capable one.
    """
    small = engine in (None, "embedded") and model is None
    flags: dict[str, Any] = {
        "tasks": "bundled",
        "harness": harness or ["pi", "claude-code"],
        "engine": engine,
        "engine_kind": engine_kind,
        "model": model,
        "attempts": attempts,
        "only": only,
        "concurrency": concurrency,
        "sampling": {
            "max_tokens": max_tokens or (SMALL["max_tokens"] if small else None),
            "temperature": temperature,
        },
        "limits": {
            "turns": max_turns or (SMALL["turns"] if small else None),
            "wall_clock": wall_clock or (SMALL["wall_clock"] if small else None),
        },
    }
    run(load_config(None, flags), out, as_json)
