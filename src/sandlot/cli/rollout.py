"""`sandlot rollout`: run agents on tasks and write a run directory."""

from __future__ import annotations

import asyncio
import itertools
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandlot.cli.common import (
    JsonFlag,
    SandboxName,
    SandboxOptions,
    answer,
    console,
    counted,
    print_json,
    sandbox_options,
)
from sandlot.cli.grading import Countercheck, Credit, Reruns, TestTimeout, Weight, grading_flags
from sandlot.config import RunConfig, load_config
from sandlot.errors import FailureKind, SandlotError
from sandlot.terminal import literal

if TYPE_CHECKING:
    from sandlot.rollout.outcome import EpisodeResult

Harnesses = Annotated[
    list[str] | None,
    typer.Option("--harness", "-H", help="Agent: NAME[:WIRE][:OPTION=VALUE]...; may be given again."),
]
Only = Annotated[list[str] | None, typer.Option("--only", help="Run this task only; may be given again.")]
Engine = Annotated[
    str | None, typer.Option(help="`embedded`, `scripted`, or URLs with commas between.", show_default="embedded")
]
Kind = Annotated[
    str | None, typer.Option("--engine-kind", help="What the URL speaks: `vllm` or `sglang`.", show_default="vllm")
]
Model = Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the embedded model.")]
Attempts = Annotated[
    int | None, typer.Option("-n", "--attempts", help="Episodes per task and harness.", show_default="1")
]
Concurrency = Annotated[int | None, typer.Option("-j", "--concurrency", help="Episodes at once; 0: by the cores.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Run directory; an existing one is continued.")]
Turns = Annotated[int | None, typer.Option("--max-turns", help="Model calls per episode.")]
Tokens = Annotated[int | None, typer.Option("--max-tokens", help="Sampled tokens per turn.")]
Seconds = Annotated[float | None, typer.Option("--wall-clock", help="Seconds per episode.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Sampling temperature.", show_default="1.0")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with the same settings.")]


def command(
    tasks: Annotated[str | None, typer.Argument(help="`bundled`, a task directory, or a .jsonl of rows.")] = None,
    harness: Harnesses = None,
    sandbox: SandboxName = None,
    sandbox_option: SandboxOptions = None,
    engine: Engine = None,
    engine_kind: Kind = None,
    model: Model = None,
    served_model: Annotated[str | None, typer.Option(help="Model name at the engine.")] = None,
    attempts: Attempts = None,
    only: Only = None,
    concurrency: Concurrency = None,
    max_turns: Turns = None,
    max_tokens: Tokens = None,
    wall_clock: Seconds = None,
    temperature: Temperature = None,
    credit: Credit = None,
    reruns: Reruns = None,
    weight: Weight = None,
    test_timeout: TestTimeout = None,
    countercheck: Countercheck = None,
    out: Out = None,
    config: ConfigFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Run every harness on every task, n times, into a run directory. The same command again continues it."""
    flags: dict[str, Any] = {
        "tasks": tasks,
        "harness": harness,
        "sandbox": sandbox,
        "sandbox_options": sandbox_options(sandbox_option),
        "engine": engine,
        "engine_kind": engine_kind,
        "model": model,
        "served_model": served_model,
        "attempts": attempts,
        "only": only,
        "concurrency": concurrency,
        "sampling": {"max_tokens": max_tokens, "temperature": temperature},
        "limits": {"turns": max_turns, "wall_clock": wall_clock},
        "grading": grading_flags(credit, reruns, weight, test_timeout, countercheck),
    }
    run(load_config(config, flags), out, as_json)


def run(config: RunConfig, out: Path | None, as_json: bool) -> None:
    """Roll out and show what came of it."""
    from sandlot.gateway.process import allow_many_connections
    from sandlot.rollout.progress import LiveTable
    from sandlot.rollout.run import rollout

    allow_many_connections()  # an episode has a dozen files open: pipes, sockets, its journal
    path = out or _new_run()
    started = time.monotonic()
    try:
        if as_json and not console.is_terminal:
            results = asyncio.run(rollout(config, path))
        else:
            with LiveTable(console) as table:
                results = asyncio.run(rollout(config, path, progress=table, say=table.say))
    except KeyboardInterrupt:
        if (path / "run.toml").exists():
            console.print(f"interrupted; the same command with --out {literal(str(path))} continues", soft_wrap=True)
        raise
    seconds = time.monotonic() - started
    states = {state: sum(r.state == state for r in results) for state in ("solved", "failed", "ungraded")}
    lost = [r for r in results if r.failure is FailureKind.INFRA_ERROR]
    if as_json:
        print_json(
            {
                "run": str(path),
                "seconds": round(seconds, 1),
                **states,
                "episodes": [
                    {"episode_id": r.episode_id, "reward": r.reward, "failure": r.failure, "detail": r.detail}
                    for r in results
                ],
            }
        )
    else:
        _show(results, path, states, seconds)
    if len(lost) > config.max_infra_share * len(results):
        raise SandlotError(
            f"{len(lost)} of {len(results)} episodes were lost to infrastructure, the last so: {lost[-1].detail}; mend "
            "that, and the same command tries them again"
        )


def _show(results: list[EpisodeResult], path: Path, states: Mapping[str, int], seconds: float) -> None:
    from sandlot.rollout.progress import summary_table

    answer.print(summary_table(results, answer))
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    shown = literal(str(path))
    answer.print(
        f"{counted(len(results), 'episode')} in {seconds:.0f} s: {counts}. The run is in [bold]{shown}[/]",
        soft_wrap=True,
    )
    quoted = shlex.quote(str(path))
    answer.print("next:")
    for what, line in (
        ("prove its samples", f"sandlot audit {quoted}"),
        ("look at it", f"sandlot view {quoted}"),
        ("take its samples", f"sandlot export {quoted} --to parquet"),
    ):
        answer.print(f"  [cyan]{literal(line)}[/]  [dim]# {what}[/]", highlight=False, soft_wrap=True)


def _new_run() -> Path:
    """A directory in `runs` that is named by the time and is not there yet."""
    base = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([base], (base.with_name(f"{base.name}-{number}") for number in itertools.count(2)))
    return next(path for path in names if not path.exists())
