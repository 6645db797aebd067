"""`sandlot export`: the samples of a run in the form of a trainer, credited where it needs credit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from sandlot.cli.common import JsonFlag, answer, counted, print_json
from sandlot.errors import ConfigError
from sandlot.terminal import literal

if TYPE_CHECKING:
    from sandlot.train.credit import CreditConfig
    from sandlot.trainers import Exporter
    from sandlot.trajectory.journal import JournalContent
    from sandlot.trajectory.rundir import RunDir
    from sandlot.trajectory.sample import Sample


_ADVANTAGES = {"estimator", "weights", "gamma", "k"}
"""Choices of credit that show in nothing but advantages and weights."""


def command(
    run: Annotated[Path | None, typer.Argument(help="A run directory.", show_default=False)] = None,
    to: Annotated[str, typer.Option("--to", help="Form of the samples; `--list` shows all.")] = "parquet",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default RUN/export.<form>.")] = None,
    advantage: Annotated[
        str | None, typer.Option(help="How rewards of a group become advantages: grpo (default), rloo, max_at_k …")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="What tokens weigh: per_episode (default), per_token, per_sample.")
    ] = None,
    branches: Annotated[
        str | None, typer.Option(help="Who is credited: all (default), main_only, by_share, turn_discount.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cut longer rows at whole turns.", min=1)] = None,
    credit: Annotated[
        list[str] | None,
        typer.Option("--credit", help="Another choice of credit: gamma, k, abandoned, single, uniform, truncated=…"),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the form: NAME=VALUE.")] = None,
    graded_only: Annotated[bool, typer.Option("--graded-only", help="Leave out ungraded samples.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show all forms and end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write all samples of RUN into one file. They are audited first; a sample that fails stops the export, an episode
    that cannot be read is left out.

    Forms of trainers take graded samples only, and credit is given to whole episodes before they are written.
    """
    from sandlot.trainers import TRAINERS

    if show_list:
        _list(as_json)
        return
    if run is None:
        raise ConfigError("name the run to export, or use --list to see the forms")
    exporter: Exporter = TRAINERS.get(to)
    options = _pairs("--set", settings)
    choices = {"estimator": advantage, "weights": weights, "branches": branches, "max_tokens": max_tokens}
    choices = {name: value for name, value in choices.items() if value is not None} | _pairs("--credit", credit)
    if choices and exporter.as_is:
        raise ConfigError(f"{to} takes samples as they are; credit and --max-tokens are for the forms of trainers")
    config = None if exporter.as_is else _config(choices)
    if config is not None and not exporter.credited:
        only_advantages = {"branches"} if config.branches not in ("all", "main_only") else set()
        if given := (_ADVANTAGES | only_advantages) & set(choices):
            raise ConfigError(
                f"{to} has no place for advantages, its trainer computes them: leave out {sorted(given)[0]!r}"
            )
    from sandlot.cli.common import ticking
    from sandlot.rollout.format import recorded_format
    from sandlot.rollout.proof import audit_run
    from sandlot.trainers import Export
    from sandlot.trajectory.rundir import RunDir

    opened = RunDir.read(run)
    with ticking("auditing") as tick:
        audited = audit_run(opened, tick)
    audited.raise_for_violations()
    picked = _Picked(opened, config, graded_only, audited.unreadable)
    target = out or run / (f"export.{to}" if to == exporter.suffix else f"export.{to}.{exporter.suffix}")
    export = Export(
        picked.groups,
        sampling=opened.config.get("sampling", {}),
        sampling_of=picked.sampling_of,
        options=options,
        journals=picked.journals,
        format=lambda: recorded_format(opened.config),
    )
    rows = exporter.write(target, export)
    counts = {
        "file": str(target),
        "form": to,
        "rows": rows,
        "samples": picked.samples,
        "trained_tokens": picked.trained_tokens,
        "left_out": {**picked.unreadable, **picked.left_out},
    }
    if as_json:
        print_json(counts)
        return
    trained = f"{counted(picked.samples, 'sample')} with {counted(picked.trained_tokens, 'trained token')}"
    holding = f": {trained}" if picked.samples else ""
    answer.print(f"{counted(rows, 'row')} in {literal(str(target))}{holding}", highlight=False, soft_wrap=True)
    for why, count in sorted(Counter(picked.left_out.values()).items()):
        answer.print(f"left out: {counted(count, 'episode')} ({literal(why)})", style="dim")
    if picked.unreadable:
        answer.print(f"[red]left out:[/] {literal(picked.lost)}", highlight=False, soft_wrap=True)


@dataclass
class _Picked:
    """The samples of a run that are exported, a group at a time, and what was counted on the way.

    `unreadable` says why by episode: those are neither exported nor compared with others.
    """

    run: RunDir
    config: CreditConfig | None
    graded_only: bool
    unreadable: Mapping[str, str]
    samples: int = 0
    trained_tokens: int = 0
    left_out: dict[str, str] = field(default_factory=dict)

    def groups(self) -> Iterator[Sequence[Sample]]:
        for group in self._credited() if self.config else self.run.sample_groups(without=self.unreadable):
            if chosen := [s for s in group if s.reward is not None or not self.graded_only]:
                self.samples += len(chosen)
                self.trained_tokens += sum(int(s.loss_mask.sum()) for s in chosen)
                yield chosen
        if not self.samples:
            raise ConfigError(
                f"{self.run.path} holds no samples to export; run `sandlot view {self.run.path}` to see what became "
                f"of its episodes{self.lost and '; '}{self.lost}"
            )

    @property
    def lost(self) -> str:
        """What cannot be read, in words; empty when there is no such episode."""
        for episode_id, why in self.unreadable.items():
            return f"{counted(len(self.unreadable), 'episode')} that cannot be read; the first, {episode_id}: {why}"
        return ""

    def sampling_of(self, episode_id: str) -> Mapping[str, Any]:
        """What an episode was sampled with: a gateway's sessions may differ."""
        from sandlot.trajectory.journal import read_header

        header = read_header(self.run.journal_path(episode_id))
        return header.sampling if header else {}

    def journals(self) -> Iterator[JournalContent]:
        from sandlot.trajectory.journal import read_journal

        readable = (e for e in self.run.finished() if e not in self.unreadable)
        return map(read_journal, map(self.run.journal_path, readable))

    def _credited(self) -> Iterator[Sequence[Sample]]:
        from sandlot.train.credit import Outcome, credit_groups

        outcomes = [Outcome.from_row(row) for row in self.run.results() if row["episode_id"] not in self.unreadable]
        groups = self.run.sample_groups(without=self.unreadable)
        for done in credit_groups(groups, self.config, outcomes=outcomes):
            self.left_out |= done.dropped
            yield done.samples


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
    answer.print(table)


def _pairs(flag: str, written: Sequence[str] | None) -> dict[str, Any]:
    found = {}
    for text in written or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"{flag} {text!r} is not NAME=VALUE")
        found[name] = value
    return found


def _config(choices: Mapping[str, Any]) -> CreditConfig:
    from sandlot.train.credit import CreditConfig

    known = {field.name for field in fields(CreditConfig)}
    if unknown := set(choices) - known:
        raise ConfigError(f"there is no choice of credit {sorted(unknown)[0]!r}; there are: {', '.join(sorted(known))}")
    if choices.get("branches") == "turn_rewards":
        raise ConfigError("rewards per turn are given in Python, to `sandlot.train.credit.credit`")
    try:
        return TypeAdapter(CreditConfig).validate_python(dict(choices))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"credit: {first['loc'][0]} is {first['input']!r}; {first['msg'].lower()}") from error
