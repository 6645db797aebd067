"""`sandlot export`: the samples of a run in the form of a trainer, credited where it needs credit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.table import Table

from sandlot.cli.common import JsonFlag, console, print_json
from sandlot.errors import ConfigError

if TYPE_CHECKING:
    from sandlot.train.credit import CreditConfig, Credited
    from sandlot.trainers import Exporter
    from sandlot.trajectory.rundir import RunDir


def command(
    run: Annotated[Path | None, typer.Argument(help="A run directory.", show_default=False)] = None,
    to: Annotated[str, typer.Option("--to", help="Form of the samples; `--list` shows all.")] = "parquet",
    out: Annotated[Path | None, typer.Option(help="File to write; default RUN/export.<form>.")] = None,
    advantage: Annotated[str, typer.Option(help="How rewards of a group become advantages.")] = "grpo",
    weights: Annotated[
        str, typer.Option(help="What tokens weigh: per_episode, per_token, per_sample.")
    ] = "per_episode",
    branches: Annotated[str, typer.Option(help="Who is credited: all, main_only, by_share, turn_discount.")] = "all",
    gamma: Annotated[float, typer.Option(help="Discount per later turn, for turn_discount.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Cut longer rows at whole turns.", min=1)] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the form: NAME=VALUE.")] = None,
    graded_only: Annotated[bool, typer.Option("--graded-only", help="Leave out ungraded samples.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show all forms and end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write all samples of RUN into one file. They are audited first; a sample that fails stops the export.

    Forms of trainers take graded samples only, and credit is given to whole episodes before they are written.
    """
    from sandlot.trainers import TRAINERS

    if show_list:
        _list(as_json)
        return
    if run is None:
        raise ConfigError("name the run to export, or use --list to see the forms")
    exporter: Exporter = TRAINERS.get(to)
    options = _options(settings or ())
    from sandlot.rollout.proof import audit_run
    from sandlot.trainers import Export
    from sandlot.trajectory.journal import read_journal
    from sandlot.trajectory.rundir import RunDir

    opened = RunDir.read(run)
    audit_run(opened).raise_for_violations()
    own = to in ("parquet", "jsonl")
    samples = [s for s in opened.samples() if s.reward is not None or not (graded_only or not own)]
    dropped: dict[str, str] = {}
    if exporter.credited or (max_tokens is not None and not own):
        done = _credited(opened, _config(advantage, weights, branches, gamma, max_tokens))
        samples, dropped = done.samples, done.dropped
    if not samples and to != "atif":
        raise ConfigError(
            f"{run} holds no samples to export; run `sandlot view {run}` to see what became of its episodes"
        )
    target = out or run / (f"export.{to}" if to == exporter.suffix else f"export.{to}.{exporter.suffix}")
    model = opened.config.get("model")
    export = Export(
        samples,
        sampling=opened.config.get("sampling", {}),
        model=Path(model) if model and Path(model).is_dir() else None,
        options=options,
        journals=lambda: (read_journal(opened.journal_path(str(row["episode_id"]))) for row in opened.results()),
    )
    rows = exporter.write(target, export)
    counts = {
        "file": str(target),
        "form": to,
        "rows": rows,
        "samples": len(samples),
        "trained_tokens": sum(int(s.loss_mask.sum()) for s in samples),
        "left_out": dropped,
    }
    if as_json:
        print_json(counts)
        return
    console.print(f"{counts['samples']:,} samples with {counts['trained_tokens']:,} trained tokens in {target}")
    for why in sorted(set(dropped.values())):
        console.print(f"left out: {sum(w == why for w in dropped.values())} episodes ({why})", style="dim")


def _list(as_json: bool) -> None:
    from sandlot.trainers import TRAINERS

    forms: dict[str, Exporter] = {name: TRAINERS.get(name) for name in TRAINERS.names()}
    if as_json:
        rows = {
            name: {"summary": e.summary, "suffix": e.suffix, "credited": e.credited, "options": dict(e.options)}
            for name, e in forms.items()
        }
        print_json(rows)
        return
    table = Table(header_style="bold")
    for column in ("form", "what is written", "options (--set)"):
        table.add_column(column, overflow="fold")
    for name, exporter in forms.items():
        credit = "; with advantages" if exporter.credited else ""
        options = "\n".join(f"{key}: {text}" for key, text in exporter.options.items())
        table.add_row(name, exporter.summary + credit, options)
    console.print(table)


def _options(settings: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"--set {text!r} is not NAME=VALUE")
        found[name] = value
    return found


def _config(estimator: str, weights: str, branches: str, gamma: float, max_tokens: int | None) -> CreditConfig:
    from sandlot.train.advantage import Estimator
    from sandlot.train.credit import Branches, CreditConfig, Weights

    for flag, value, known in (
        ("--advantage", estimator, get_args(Estimator)),
        ("--weights", weights, get_args(Weights)),
        ("--branches", branches, tuple(b for b in get_args(Branches) if b != "turn_rewards")),
    ):
        if value not in known:
            raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(known)}")
    return CreditConfig(
        estimator=cast(Any, estimator),
        weights=cast(Any, weights),
        branches=cast(Any, branches),
        gamma=gamma,
        max_tokens=max_tokens,
    )


def _credited(run: RunDir, config: CreditConfig) -> Credited:
    from sandlot.train.credit import Outcome, credit

    return credit(run.samples(), config, outcomes=[Outcome.from_row(row) for row in run.results()])
