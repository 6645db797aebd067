"""`sandlot export`: the samples of a run in a form that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sandlot.cli.common import JsonFlag, RunArgument, console, print_json
from sandlot.errors import ConfigError


def command(
    run: RunArgument,
    to: Annotated[Literal["parquet", "jsonl"], typer.Option("--to", help="Form of the samples.")] = "parquet",
    out: Annotated[Path | None, typer.Option(help="File to write; default RUN/export.<form>.")] = None,
    graded_only: Annotated[bool, typer.Option("--graded-only", help="Leave out ungraded samples.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write all samples of RUN into one file. They are audited first; a sample that fails stops the export."""
    from sandlot.rollout.proof import audit_run
    from sandlot.trajectory.rundir import RunDir
    from sandlot.trajectory.store import write_jsonl, write_samples

    opened = RunDir.read(run)
    audit_run(opened).raise_for_violations()
    samples = [s for s in opened.samples() if s.reward is not None or not graded_only]
    if not samples:
        raise ConfigError(
            f"{run} holds no samples to export; run `sandlot view {run}` to see what became of its episodes"
        )
    target = out or run / f"export.{to}"
    (write_samples if to == "parquet" else write_jsonl)(target, samples)
    counts = {
        "file": str(target),
        "samples": len(samples),
        "trained_tokens": sum(int(s.loss_mask.sum()) for s in samples),
    }
    if as_json:
        print_json(counts)
    else:
        console.print(f"{counts['samples']:,} samples with {counts['trained_tokens']:,} trained tokens in {target}")
