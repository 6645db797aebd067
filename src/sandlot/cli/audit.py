"""`sandlot audit`: prove the samples of a run from its journals."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from sandlot.cli.common import JsonFlag, RunArgument, answer, print_json
from sandlot.terminal import literal


def command(
    run: RunArgument,
    engine: Annotated[str, typer.Option("--rescore", help="Engine URL: score samples again, report the gap.")] = "",
    engine_kind: Annotated[str, typer.Option(help="What that URL speaks: `vllm` or `sglang`.")] = "vllm",
    as_json: JsonFlag = False,
) -> None:
    """Prove that every trained token of RUN was sampled there, under that prompt, with that logprob, once."""
    from sandlot.cli.common import ticking
    from sandlot.rollout.proof import audit_run, rescore
    from sandlot.trajectory.rundir import RunDir

    opened = RunDir.read(run)
    with ticking("auditing") as tick:
        found = audit_run(opened, tick)
    gap = None
    if engine:
        with ticking("re-scoring") as tick:
            gap = rescore(opened, engine, tick, kind=engine_kind, without=found.unreadable)
    if as_json:
        print_json(found.as_dict() | ({"rescore": gap.as_dict()} if gap else {}))
    else:
        table = Table(show_header=False, box=None)
        for name, count in found.counts.items():
            table.add_row(name.replace("_", " "), f"{count:,}")
        violations = len(found.violations)
        table.add_row("violations", f"[red]{violations}[/]" if violations else "[green]0[/]")
        if gap:
            table.add_row("rescored tokens", f"{gap.tokens:,}")
            table.add_row("largest logprob gap", f"{gap.largest:.2e}")
            table.add_row("mean logprob gap", f"{gap.mean:.2e}")
        answer.print(table)
        for episode_id, violation in found.violations[:50]:
            answer.print(f"[red]{literal(episode_id)}[/] {literal(str(violation))}", highlight=False, soft_wrap=True)
    if found.violations:
        raise typer.Exit(1)
