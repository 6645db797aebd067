"""What a session's turns say about themselves, worked out for the audit alone.

Nothing here is shared with the code that builds samples: prompts are rebuilt from the deltas and compared by hash and
by value, and the token parents are found again by hashing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from sandlot.ids import Ids
from sandlot.trajectory.turn import Turn

_Problem = tuple[str, int | None, str]  # kind, position, detail

HIGHEST_LOGPROB = 1e-4
"""Rounding lets a certain token come out a little above 0."""
LOWEST_LOGPROB = -9999.0
"""What engines write where they have no logprob."""


@dataclass(frozen=True)
class Violation:
    """One broken promise: what kind, in which sample (index), at which turn and token position, in words."""

    kind: str
    sample: int | None = None
    turn: str | None = None
    position: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = [f"sample {self.sample}" if self.sample is not None else "", f"turn {self.turn}" if self.turn else ""]
        where.append(f"token {self.position}" if self.position is not None else "")
        return f"{self.kind} ({', '.join(w for w in where if w) or 'session'}): {self.detail}"


class Session:
    """The turns of a session that are sound, and how they hang together.

    `violations` names the ones that are not; those take no part in anything else.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.violations: list[Violation] = []
        self.turns: dict[str, Turn] = {}
        self.parents: dict[str, str | None] = {}
        self.children: dict[str, list[str]] = {}
        self._after: dict[str, hashlib._Hash] = {}
        self._by_digest: dict[tuple[int, bytes], str] = {}
        self._lengths: set[int] = set()
        for turn in turns:
            problems = self._problems(turn) or self._delta_problems(turn) or self._take(turn)
            self.violations += [Violation(kind, None, turn.id, at, why) for kind, at, why in problems]

    def kept(self, turn: Turn) -> bool:
        """Whether the client evidently had the reply: it was delivered, or a later prompt continues it."""
        return turn.delivered or turn.id in self.children

    def path(self, turn_id: str) -> list[str]:
        """Turn ids from the root of the token tree to `turn_id`."""
        path = [turn_id]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]

    def kept_children(self, turn_id: str) -> list[Turn]:
        """The kept turns that continue a turn."""
        return [t for c in self.children.get(turn_id, ()) if self.kept(t := self.turns[c])]

    def abandoned(self, turn: Turn) -> bool:
        """Whether nothing continues a turn, but another answer to the same prompt."""
        return turn.id not in self.children and (turn.prompt_length, turn.prompt_sha256) in self._continued

    @cached_property
    def _continued(self) -> set[tuple[int, str]]:
        """Prompts whose answer was continued."""
        return {(self.turns[turn_id].prompt_length, self.turns[turn_id].prompt_sha256) for turn_id in self.children}

    def pieces(self, turn: Turn, known: Mapping[str, int] = MappingProxyType({})) -> list[tuple[Turn, int]]:
        """The delta chain of a turn's prompt: (turn, how many of its leading tokens count), nearest first.

        `known` says up to where turns need not be looked at again.
        """
        chain, upto, at = [(turn, turn.prompt_length)], turn.shared, turn.parent
        while at is not None and upto > known.get(at, 0):
            parent = self.turns[at]
            chain.append((parent, upto))
            upto, at = min(upto, parent.shared), parent.parent
        return chain

    def prompt(self, turn: Turn) -> Ids:
        """The prompt of a turn, rebuilt from the deltas."""
        prompt = np.empty(turn.prompt_length, dtype=np.int32)
        for source, upto in self.pieces(turn):
            own = source.new_ids[: max(0, upto - source.shared)]
            prompt[source.shared : source.shared + len(own)] = own
            sampled = source.output_ids[: max(0, upto - source.prompt_length)]
            prompt[source.prompt_length : source.prompt_length + len(sampled)] = sampled
        return prompt

    def _problems(self, turn: Turn) -> list[_Problem]:
        """What is wrong with a turn by itself and as a continuation: (kind, position, detail)."""
        found: list[_Problem] = []
        count = len(turn.output_ids)
        if turn.id in self.turns:
            found.append(("turn_duplicate", None, "its id is there twice"))
        if not count:
            found.append(("turn_empty", None, "nothing was sampled"))
        if (np.asarray(turn.output_ids) < 0).any() or (np.asarray(turn.new_ids) < 0).any():
            found.append(("turn_token", None, "a token id is negative"))
        if turn.finish_reason not in ("stop", "length"):
            found.append(("turn_finish", None, f"finish reason {turn.finish_reason!r} is not a finished turn"))
        found += _logprob_problems(turn.logprobs, count)
        if turn.logprobs_mode not in ("processed", "raw", "unknown"):  # by a probe that could not tell
            found.append(
                ("turn_mode", None, f"logprobs of the mode {turn.logprobs_mode!r} are of no known distribution")
            )
        if turn.logprobs_mode == "raw" and not _unchanged_by_sampling(turn):
            found.append(("turn_mode", None, "logprobs are of the raw logits, the sampling was not"))
        edges = [0, *(end for _, _, end in turn.versions)]
        tiles = edges == sorted(edges) and edges[:-1] == [start for _, start, _ in turn.versions]
        if not tiles or edges[-1] != count or any(not version for version, _, _ in turn.versions):
            found.append(("turn_versions", None, f"weight versions do not tile the {count} sampled tokens"))
        return found

    def _delta_problems(self, turn: Turn) -> list[_Problem]:
        parent = self.turns.get(turn.parent) if turn.parent is not None else None
        if turn.parent is not None and parent is None:
            return [("turn_parent", None, f"it continues {turn.parent!r}, which is no sound earlier turn")]
        if not 0 <= turn.shared <= (parent.length if parent else 0):
            return [("turn_shared", turn.shared, "it shares more tokens than its parent has")]
        if turn.prompt_length != turn.shared + len(turn.new_ids) or not turn.prompt_length:
            return [("turn_prompt_length", turn.prompt_length, "its delta gives another number of tokens")]
        return []

    def _take(self, turn: Turn) -> list[_Problem]:
        """Place a turn in the tree, if its delta gives the prompt that was sent."""
        if turn.parent is not None and turn.shared == self.turns[turn.parent].length:
            parent: str | None = turn.parent
            hasher = self._after[turn.parent].copy()
            hasher.update(raw(turn.new_ids))
        else:
            parent, hasher = self._deepest_prefix(self.prompt(turn))
        if hasher.hexdigest() != turn.prompt_sha256:
            return [("turn_prompt", None, "its delta does not give the prompt that was sent (SHA-256 differs)")]
        self.parents[turn.id] = parent
        if parent is not None:
            self.children.setdefault(parent, []).append(turn.id)
        hasher.update(raw(turn.output_ids))
        self.turns[turn.id] = turn
        self._after[turn.id] = hasher
        self._by_digest[turn.length, hasher.digest()] = turn.id
        self._lengths.add(turn.length)
        return []

    def _deepest_prefix(self, prompt: Ids) -> tuple[str | None, hashlib._Hash]:
        """The latest of the longest turns whose whole sequence begins `prompt`, and the hash of the prompt."""
        hasher, at, found = hashlib.sha256(), 0, None
        for length in sorted(n for n in self._lengths if n <= len(prompt)):
            hasher.update(raw(prompt[at:length]))
            at, found = length, self._by_digest.get((length, hasher.digest()), found)
        hasher.update(raw(prompt[at:]))
        return found, hasher


def raw(ids: Ids) -> bytes:
    """Token ids as they are hashed: little-endian int32."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def _logprob_problems(logprobs: npt.NDArray[np.float64], count: int) -> list[_Problem]:
    if len(logprobs) != count:
        return [("turn_logprobs", None, f"{count} sampled tokens came with {len(logprobs)} logprobs")]
    good = np.isfinite(logprobs) & (logprobs <= HIGHEST_LOGPROB) & (logprobs > LOWEST_LOGPROB)
    if good.all():
        return []
    at = int(np.argmin(good))
    return [("turn_logprobs", at, f"the logprob {logprobs[at]} is none")]


def _unchanged_by_sampling(turn: Turn) -> bool:
    sampling = turn.sampling
    return (
        sampling.get("temperature", 1.0) == 1.0
        and sampling.get("top_p", 1.0) == 1.0
        and sampling.get("top_k", -1) in (-1, 0, None)
    )
