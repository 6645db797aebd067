"""What a running rollout shows people: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sandlot.rollout.outcome import EpisodeResult
from sandlot.terminal import literal, visible

STYLES: Mapping[str, str] = {"solved": "green", "failed": "yellow", "ungraded": "red"}


class Progress(Protocol):
    """Told by the rollout what happens; must not block."""

    def begin(self, total: int, done: int) -> None: ...

    def phase(self, episode_id: str, phase: str) -> None: ...

    def turn(self, episode_id: str, turns: int, tokens: int) -> None: ...

    def done(self, result: EpisodeResult) -> None: ...


class Silent:
    """Shows nothing."""

    def begin(self, total: int, done: int) -> None: ...

    def phase(self, episode_id: str, phase: str) -> None: ...

    def turn(self, episode_id: str, turns: int, tokens: int) -> None: ...

    def done(self, result: EpisodeResult) -> None: ...


class LiveTable:
    """Running episodes with their phase, counts of the finished ones, and a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._done = 0
        self._states = dict.fromkeys(STYLES, 0)
        self._running: dict[str, tuple[float, str]] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._started = time.monotonic()
        self._step = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def begin(self, total: int, done: int) -> None:
        self._total, self._done = total, done

    def phase(self, episode_id: str, phase: str) -> None:
        since = self._running.get(episode_id, (time.monotonic(), ""))[0]
        self._running[episode_id] = (since, phase)

    def say(self, text: str) -> None:
        """A long step that belongs to no episode."""
        self._step = text
        if not self._live.is_started:
            self._console.print(Text(visible(text), style="dim"))

    def turn(self, episode_id: str, turns: int, tokens: int) -> None:
        self._counts[episode_id] = (turns, tokens)

    def done(self, result: EpisodeResult) -> None:
        self._running.pop(result.episode_id, None)
        self._counts.pop(result.episode_id, None)
        self._done += 1
        self._states[result.state] += 1
        why = f" ({result.failure}: {visible(result.detail)})" if result.failure else ""
        line = Text.assemble(
            (f"{result.state:>8}", STYLES[result.state]),
            f"  {result.episode_id}  {result.turns} turns  {result.sampled_tokens} tokens"
            f"  {result.total_seconds:.1f} s",
            (why, "dim"),
        )
        self._console.print(line, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("running", "phase", "turns", "tokens", "seconds"):
            table.add_column(name, justify="left" if name in ("running", "phase") else "right")
        now = time.monotonic()
        for episode_id, (since, phase) in list(self._running.items())[: max(4, self._console.height - 6)]:
            turns, tokens = self._counts.get(episode_id, (0, 0))
            table.add_row(literal(episode_id), phase, str(turns), str(tokens), f"{now - since:.0f}")
        bar = ProgressBar(total=self._total, completed=self._done, width=40)
        states = "  ".join(f"[{STYLES[name]}]{count} {name}[/]" for name, count in self._states.items())
        line = Text.from_markup(f" {self._done}/{self._total}  {states}  {now - self._started:.0f} s")
        return Group(table if self._running else Text(self._step, style="dim"), bar, line)


def summary_table(results: list[EpisodeResult], console: Console) -> Table:
    """One row per task and harness: what became of its attempts, and what they cost; less of it where `console` is
    narrow."""
    table = _summary(results, all_of_it=True)
    if Measurement.get(console, console.options.update(max_width=1 << 16), table).minimum > console.width:
        table = _summary(results, all_of_it=False)
    return table


def _summary(results: list[EpisodeResult], *, all_of_it: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    for name in ("task", "harness"):
        table.add_column(name, no_wrap=all_of_it, overflow="fold")
    costs = ("turns", "sampled", "trained", *(("forks", "seconds") if all_of_it else ()))
    for name in (*STYLES, *costs):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    if all_of_it:
        table.add_column("why", overflow="fold", min_width=6)
    groups: dict[tuple[str, str], list[EpisodeResult]] = {}
    for result in results:
        groups.setdefault((result.task, result.harness), []).append(result)
    rows = [(task, harness, members) for (task, harness), members in sorted(groups.items())]
    for task, harness, members in (*rows, ("all", "", results)):
        if members is results:
            table.add_section()
        states = [sum(r.state == name for r in members) for name in STYLES]
        cells = [f"[{style}]{n}[/]" if n else "[dim]0[/]" for n, style in zip(states, STYLES.values(), strict=True)]
        cells += [f"{sum(count):,}" for count in zip(*map(_counts, members), strict=True)] or ["0"] * 4
        cells.append(f"{sum(r.total_seconds for r in members):,.1f}")
        cells.append(
            ", ".join(sorted({str(r.failure) for r in members if r.failure})) if members is not results else ""
        )
        table.add_row(literal(task), literal(harness), *cells[: len(table.columns) - 2])
    return table


def _counts(result: EpisodeResult) -> tuple[int, int, int, int]:
    return result.turns, result.sampled_tokens, result.trained_tokens, result.forks
