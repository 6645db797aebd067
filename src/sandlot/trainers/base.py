"""The contract of a trainer's adapter, and what every adapter refuses before it looks at its own rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from sandlot.chat.base import ChatFormat
from sandlot.errors import SandlotError
from sandlot.train.episodes import gather, trained_tokens
from sandlot.train.turns import SPAN_ADVANTAGES
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.store import write_atomically

STATUSES = ("completed", "truncated")
"""What a row that may be trained can be; an aborted one never becomes a row."""


class TrainerDataError(SandlotError):
    """Rows that a trainer would take and train wrongly."""


Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Export:
    """What an export works on. `groups` gives the rows of one group after the other, credited if the exporter asks.

    `sampling` is the policy's (`temperature`, `top_p`, `top_k`), `sampling_of` what of it an episode had otherwise;
    `options` come from the command line. `journals` gives the journal of every finished episode, `format` the chat
    format they were sampled with, None where it is not known.
    """

    groups: Callable[[], Iterable[Sequence[Sample]]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    sampling_of: Callable[[str], Mapping[str, Any]] = lambda episode_id: {}
    options: Mapping[str, str] = field(default_factory=dict)
    journals: Callable[[], Iterable[JournalContent]] = lambda: ()
    format: Callable[[], ChatFormat | None] = lambda: None

    @classmethod
    def of(cls, samples: Iterable[Sample], **fields: Any) -> Export:
        """An export of samples in memory."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample)
        return cls(lambda: groups.values(), **fields)

    def temperature(self, episode_id: str) -> float:
        """What the logits of an episode's tokens were divided by."""
        return self._sampled(episode_id, "temperature")

    def top_p(self, episode_id: str) -> float:
        return self._sampled(episode_id, "top_p")

    def _sampled(self, episode_id: str, name: str) -> float:
        return float({**self.sampling, **self.sampling_of(episode_id)}.get(name, 1.0))

    def integer(self, name: str) -> int | None:
        """An option that is a whole number above 0."""
        text = self.options.get(name)
        if text is None:
            return None
        if not text.isdecimal() or int(text) == 0:
            raise TrainerDataError(f"option {name} is {text!r}; it must be a whole number above 0")
        return int(text)


@dataclass(frozen=True)
class Exporter:
    """One trainer's offline form.

    `rows` is pure: it gives what `write` writes, validated, a group at a time. It gets credited samples, or all of them
    `as_is`; `credited` says that it writes their advantages. `options` names what it takes from `--set`, described.
    """

    summary: str
    rows: Callable[[Export], Iterable[Row]]
    suffix: str = "jsonl"
    credited: bool = False
    as_is: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    write_rows: Callable[[Path, Iterable[Row]], None] | None = None

    def write(self, path: Path, export: Export) -> int:
        """Write the file whole or not at all; returns the number of rows."""
        if unknown := set(export.options) - set(self.options):
            known = ", ".join(self.options) or "none"
            raise TrainerDataError(f"this form has no option {sorted(unknown)[0]!r}; it has: {known}")
        rows = Counted(self.rows(export))
        (self.write_rows or write_json_lines)(path, rows)
        return rows.count


class Counted(Iterator[T]):
    """Passes items through and counts them."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.count = 0

    def __next__(self) -> T:
        item = next(self._items)
        self.count += 1
        return item


def group_rows(make: Callable[[Sequence[Sample]], Iterable[Row]]) -> Callable[[Export], Iterator[Row]]:
    """The `rows` of an exporter that makes those of each group for itself."""
    return lambda export: (row for group in export.groups() for row in make(group))


def write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object per line; arrays as lists."""

    def write(file: Any) -> None:
        for row in rows:
            file.write(msgspec.json.encode(row, enc_hook=_plain) + b"\n")

    write_atomically(path, write)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def checked(samples: Iterable[Sample], *, credit: bool, per_turn: bool = True) -> list[Sample]:
    """The samples if every one of them may be trained, episodes contiguous and their rows by index.

    `credit`: they need an advantage. `per_turn`: the trainer carries an advantage per token. Raises
    `TrainerDataError` (or `CreditError` for siblings that contradict each other).
    """
    rows = [row for episode in gather(samples) for row in episode.rows]
    for row in rows:
        if problem := _problem(row, credit=credit, per_turn=per_turn):
            raise TrainerDataError(f"row {row.index} of episode {row.episode_id!r} is refused: {problem}")
    return rows


def _problem(s: Sample, *, credit: bool, per_turn: bool) -> str:
    count = len(s.tokens)
    for name in ("loss_mask", "logprobs", "weight_versions"):
        if len(getattr(s, name)) != count:
            return f"it has {count} tokens and {len(getattr(s, name))} {name}"
    mask = s.loss_mask == 1
    if not mask.any():
        return "nothing in it is trained"
    if not np.isin(s.loss_mask, (0, 1)).all():
        return "its mask has values other than 0 and 1"
    if not 0 < s.prompt_length < count or mask[: s.prompt_length].any():
        return "a token of its prompt is trained, or it has no prompt"
    if not mask[-1]:
        return "it does not end on a sampled token, so a reward placed there would be lost"
    if not np.isfinite(s.logprobs).all() or (s.logprobs[mask] > 1e-4).any():
        return "it has a logprob that is not finite or above 0"
    if (s.logprobs[~mask] != 0).any():
        return "it has a logprob where nothing was sampled"
    if (s.tokens < 0).any():
        return "it has a negative token id"
    if any(bool(v) != bool(m) for v, m in zip(s.weight_versions, mask.tolist(), strict=True)):
        return "its weight versions do not cover exactly the sampled tokens"
    if s.status not in STATUSES:
        return f"its status is {s.status!r}; only {' and '.join(STATUSES)} rows can be trained"
    if s.reward is None:
        return "it is ungraded, which is not reward 0; leave it out"
    if not (math.isfinite(s.reward) and 0.0 <= s.reward <= 1.0):
        return f"its reward is {s.reward!r}, no number in [0, 1]"
    if not (math.isfinite(s.loss_weight) and s.loss_weight > 0):
        return f"its loss weight is {s.loss_weight!r}"
    if credit and s.advantage is None:
        return "it has no advantage; give credit first"
    if s.advantage is not None and not math.isfinite(s.advantage):
        return f"its advantage is {s.advantage!r}"
    if not per_turn and SPAN_ADVANTAGES in s.metadata:
        return "its turns differ in advantage and this trainer takes one a row; use `split_turns` first"
    return ""


def by_episode(rows: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Rows by the episode they belong to, by first appearance."""
    episodes: dict[str, list[Sample]] = {}
    for row in rows:
        episodes.setdefault(row.episode_id, []).append(row)
    return episodes


def response_of(s: Sample) -> slice:
    """The part of a row from its first sampled token on: what trainers call the response."""
    return slice(s.prompt_length, len(s.tokens))


def versions_of(s: Sample) -> list[str]:
    """The weight version of each trained span, in order (the first of a span that saw several)."""
    return [s.weight_versions[span.start] for span in s.spans]


def whole_versions(s: Sample, fill: int) -> list[int]:
    """Versions as whole numbers per token, `fill` where nothing was sampled; refuses versions that are none."""
    found: list[int] = []
    for text in s.weight_versions:
        if text and not text.isdecimal():
            raise TrainerDataError(
                f"row {s.index} of episode {s.episode_id!r} was sampled by weight version {text!r}, and this trainer "
                "counts versions in whole numbers; name them so when weights are pushed"
            )
        found.append(int(text) if text else fill)
    return found


def mean_weights(rows: Sequence[Sample]) -> dict[str, float]:
    """By group: what its loss weights are multiplied by so that they are 1 in the mean over its trained tokens.

    For trainers whose loss is a mean over tokens: with it, episodes of one length weigh as if there were no weights.
    """
    tokens: dict[str, int] = {}
    weights: dict[str, float] = {}
    for row in rows:
        count = trained_tokens(row)
        tokens[row.group_id] = tokens.get(row.group_id, 0) + count
        weights[row.group_id] = weights.get(row.group_id, 0.0) + row.loss_weight * count
    return {name: tokens[name] / weights[name] for name in tokens}


class Numbers(dict[str, int]):
    """A whole number for each name that is asked for, by first appearance."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def plain_metadata(s: Sample) -> Row:
    """The metadata of a row without what only Sandlot reads, and the ids that lead back to it."""
    kept = {k: v for k, v in s.metadata.items() if k != SPAN_ADVANTAGES}
    return {**kept, "episode_id": s.episode_id, "group_id": s.group_id, "branch": s.branch, "row": s.index}
