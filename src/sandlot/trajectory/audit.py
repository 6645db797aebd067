"""The audit: samples are proven from the turns of their session, token by token, or refused."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sandlot.errors import AuditError
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.proof import Session, Violation, raw
from sandlot.trajectory.sample import Sample, Span
from sandlot.trajectory.turn import Turn

__all__ = ["AuditReport", "Violation", "audit", "audit_journal"]

_WITHOUT_SAMPLES = frozenset({"aborted", "infra_error"})


@dataclass(frozen=True)
class AuditReport:
    """What was proven. Counts are of turns or of tokens; `sampled` and `trained` are tokens.

    `trained` counts tokens under the mask of all samples, `kept` the sampled tokens that had to be trained,
    `forks` the samples beyond the first, `undelivered` the turns left out because no client had them, `cut` those
    left out because they do not fit.
    """

    violations: tuple[Violation, ...]
    turns: int = 0
    sampled: int = 0
    kept: int = 0
    trained: int = 0
    samples: int = 0
    forks: int = 0
    undelivered: int = 0
    cut: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations

    def raise_for_violations(self) -> None:
        """`AuditError` with the count and the first violations, if there are any."""
        if self.violations:
            shown = "; ".join(str(v) for v in self.violations[:3])
            more = f"; and {len(self.violations) - 3} more" if len(self.violations) > 3 else ""
            raise AuditError(f"the samples are refused, {len(self.violations)} violations: {shown}{more}")


def audit(
    turns: Sequence[Turn],
    samples: Sequence[Sample],
    *,
    sealed: bool = True,
    failure: str | None = None,
    max_tokens: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> AuditReport:
    """Prove `samples` against all turns of their session, in the order they were sampled.

    `sealed`, `failure`, `max_tokens` and `metadata` are what the journal says of the session: whether it is over, how
    it failed, beyond how many tokens turns are cut, and what each sample carries besides the facts of its own path
    (None: it is not looked at). Pure; rebuilds everything it needs by itself.
    """
    session = Session(turns)
    found = list(session.violations)
    if samples and (not sealed or failure in _WITHOUT_SAMPLES or not turns):
        why = "not sealed" if not sealed else failure or "empty"
        found.append(Violation("session", detail=f"a session that is {why} has no samples"))
    trained: Counter[str] = Counter()
    checks = [_SampleCheck(session, sample, max_tokens, metadata) for sample in samples]
    for check in checks:
        found += check.violations
        trained.update(check.trained)
    if not found:
        found += _shares(session, checks)
    found += _siblings(samples)
    expects = sealed and failure not in _WITHOUT_SAMPLES
    kept = [t for t in session.turns.values() if session.kept(t)]
    fitting = [t for t in kept if max_tokens is None or t.length <= max_tokens]
    wanted = {t.id for t in fitting} if expects else set()
    for turn_id in sorted(wanted - set(trained)):
        found.append(Violation("untrained", None, turn_id, None, "its sampled tokens are trained in no sample"))
    for turn_id, times in trained.items():
        if times > 1:
            found.append(
                Violation("trained_twice", None, turn_id, None, f"its sampled tokens are trained {times} times")
            )
        if expects and turn_id not in wanted:
            found.append(
                Violation("not_kept", None, turn_id, None, "no client had it or it does not fit, yet it is trained")
            )
    return AuditReport(
        violations=tuple(found),
        turns=len(turns),
        sampled=sum(len(t.output_ids) for t in turns),
        kept=sum(len(t.output_ids) for t in fitting),
        trained=sum(int(np.count_nonzero(s.loss_mask)) for s in samples),
        samples=len(samples),
        forks=max(0, len(samples) - 1),
        undelivered=len(session.turns) - len(kept),
        cut=len(kept) - len(fitting),
    )


def audit_journal(content: JournalContent, samples: Sequence[Sample], *, failure: str | None = None) -> AuditReport:
    """Prove `samples` against the journal of their episode, also that they carry its ids, its reward and its metadata,
    and no credit, which is given when they leave the run.

    `failure` overrules the one in the journal, for an episode whose samples were refused.
    """
    header, sealed = content.header, content.sealed
    found = _sampled_otherwise(content)
    report = audit(
        content.turns,
        samples,
        sealed=sealed is not None,
        failure=failure or (sealed.failure if sealed else None),
        max_tokens=header.max_tokens if header else None,
        metadata=header.metadata if header else None,
    )
    for sample in samples:
        if header is None or (sample.episode_id, sample.group_id) != (header.episode_id, content.group_id):
            found.append(Violation("identity", sample.index, detail="its episode or group is not the journal's"))
        if sealed is None or sample.reward != sealed.reward:
            found.append(Violation("reward", sample.index, detail=f"{sample.reward!r} is not the journal's reward"))
        if (sample.advantage, sample.loss_weight) != (None, 1.0):
            found.append(
                Violation("credit", sample.index, detail="it was given credit, which a journal knows nothing of")
            )
    return replace(report, violations=report.violations + tuple(found))


def _sampled_otherwise(content: JournalContent) -> list[Violation]:
    """Turns of another distribution than their session tells, which a trainer divides its logits by."""
    told = content.header.sampling if content.header else {}
    return [
        Violation("turn_sampling", None, turn.id, None, f"{name} is {turn.sampling.get(name)!r}, not {told[name]!r}")
        for turn in content.turns
        for name in ("temperature", "top_p", "top_k")
        if name in told and turn.sampling.get(name) != told[name]
    ]


def _shares(session: Session, checks: Sequence[_SampleCheck]) -> list[Violation]:
    """Whether rows come in the order of their last turns, and each turn that several share is trained where it ought
    to be: if possible in a row that was not abandoned, then in one of its own branch, then in one that was not cut by
    its length, then in the first."""
    found: list[Violation] = []
    leaves = [session.turns[check.trained[-1]] for check in checks]
    age = {turn_id: k for k, turn_id in enumerate(session.turns)}
    best: dict[str, tuple[bool, bool, bool, int]] = {}
    for k, leaf in enumerate(leaves):
        if k and age[leaf.id] < age[leaves[k - 1].id]:
            why = "its last turn is older than that of the row before"
            found.append(Violation("order", checks[k].sample.index, leaf.id, None, why))
        abandoned, cut = session.abandoned(leaf), leaf.finish_reason == "length"
        for turn_id in session.path(leaf.id):
            fits = (abandoned, session.turns[turn_id].branch != leaf.branch, cut, k)
            if turn_id not in best or fits < best[turn_id]:
                best[turn_id] = fits
    trained = [set(check.trained) for check in checks]
    for turn_id, (*_, k) in best.items():
        if turn_id not in trained[k]:
            why = f"row {k} ought to train it, and another does"
            found.append(Violation("stretch", checks[k].sample.index, turn_id, None, why))
    return found


def _siblings(samples: Sequence[Sample]) -> list[Violation]:
    """What the rows of one episode must have in common."""
    found: list[Violation] = []
    for position, sample in enumerate(samples):
        first = samples[0]
        if sample.index != position:
            found.append(
                Violation("index", sample.index, detail=f"row {position} of the episode has index {sample.index}")
            )
        if (sample.episode_id, sample.group_id) != (first.episode_id, first.group_id):
            found.append(
                Violation("identity", sample.index, detail="rows of one session name several episodes or groups")
            )
        if sample.reward is not None and not (math.isfinite(sample.reward) and 0.0 <= sample.reward <= 1.0):
            found.append(
                Violation("reward", sample.index, detail=f"{sample.reward!r} is not a finite number in [0, 1]")
            )
        elif sample.reward != first.reward:
            found.append(
                Violation("reward", sample.index, detail=f"{sample.reward!r}, but a sibling has {first.reward!r}")
            )
        if sample.advantage is not None and not math.isfinite(sample.advantage):
            found.append(Violation("advantage", sample.index, detail=f"{sample.advantage!r} is not finite"))
        if not (math.isfinite(sample.loss_weight) and sample.loss_weight >= 0):
            found.append(Violation("loss_weight", sample.index, detail=f"{sample.loss_weight!r} is no weight"))
    return found


class _SampleCheck:
    """Checks one sample; `trained` are the turns that it trains whole."""

    def __init__(
        self, session: Session, sample: Sample, max_tokens: int | None, metadata: Mapping[str, Any] | None
    ) -> None:
        self.session = session
        self.sample = sample
        self.max_tokens = max_tokens
        self.metadata = metadata
        self.violations: list[Violation] = []
        self.trained: list[str] = []
        self._equal_upto: dict[
            str, int
        ] = {}  # turn id -> its leading tokens that this sample has been seen to begin with
        if self._shapes():
            self._spans()
            self._row()

    def _fail(self, kind: str, turn: str | None, position: int | None, detail: str) -> None:
        self.violations.append(Violation(kind, self.sample.index, turn, position, detail))

    def _shapes(self) -> bool:
        """Lengths and types; without them nothing else can be looked at."""
        s, count = self.sample, len(self.sample.tokens)
        for name in ("loss_mask", "logprobs", "weight_versions"):
            if len(getattr(s, name)) != count:
                self._fail("length", None, None, f"{count} tokens, but {len(getattr(s, name))} of {name}")
        kinds = (s.tokens.dtype, s.loss_mask.dtype, s.logprobs.dtype)
        if kinds != (np.dtype(np.int32), np.dtype(np.uint8), np.dtype(np.float32)):
            self._fail("dtype", None, None, f"tokens, loss_mask, logprobs are {', '.join(map(str, kinds))}")
        if not s.spans:
            self._fail("no_span", None, None, "nothing is trained in it")
        return not self.violations

    def _spans(self) -> None:
        """Each span is what its turn sampled, at the place where the turn sampled it; everything else is context."""
        s, count = self.sample, len(self.sample.tokens)
        mask = np.zeros(count, dtype=np.uint8)
        logprobs = np.zeros(count, dtype=np.float32)
        versions = [""] * count
        hasher, hashed, edge = hashlib.sha256(), 0, 0
        for span in s.spans:
            turn = self.session.turns.get(span.turn_id)
            if turn is None:
                self._fail("span_turn", span.turn_id, span.start, "there is no such sound turn in the session")
                continue
            if span.start < edge or span.start + span.length > count or span.length <= 0:
                self._fail("span_range", span.turn_id, span.start, "it overlaps another, is empty or leaves the sample")
                continue
            if span.offset != 0 or span.length != len(turn.output_ids):
                self._fail("span_part", span.turn_id, span.start, "it is not the whole output of its turn")
                continue
            edge = span.start + span.length
            hasher.update(raw(s.tokens[hashed : span.start]))
            hashed = span.start
            self._place(span, turn, hasher.hexdigest())
            mask[span.start : edge] = 1
            logprobs[span.start : edge] = turn.logprobs.astype(np.float32)
            for version, first, last in turn.versions:
                versions[span.start + first : span.start + last] = [version] * (last - first)
            self.trained.append(turn.id)
        self._same("mask", s.loss_mask, mask, "the mask is not exactly the union of the spans")
        self._same("logprobs", s.logprobs, logprobs, "the logprob is not the turn's, or is not 0 outside the spans")
        if s.weight_versions != tuple(versions):
            at = next(k for k, (a, b) in enumerate(zip(s.weight_versions, versions, strict=True)) if a != b)
            self._fail(
                "versions", None, at, f"weight version {s.weight_versions[at]!r}, the turn says {versions[at]!r}"
            )

    def _place(self, span: Span, turn: Turn, digest: str) -> None:
        """The tokens before a span are the prompt of its turn, its tokens are what was sampled."""
        if span.start != turn.prompt_length or digest != turn.prompt_sha256:
            self._fail("prompt", turn.id, span.start, "the tokens before it are not the prompt it was sampled from")
            return
        if (at := self._differs(turn)) is not None:
            self._fail("prompt", turn.id, at, "the tokens before it are not the prompt that its delta gives")
            return
        here = self.sample.tokens[span.start : span.start + span.length]
        if not np.array_equal(here, turn.output_ids):
            at = span.start + int(np.argmax(here != turn.output_ids))
            self._fail("tokens", turn.id, at, "the token is not the one that was sampled there")
            return
        self._equal_upto[turn.id] = turn.length

    def _differs(self, turn: Turn) -> int | None:
        """First position where the sample is not the prompt of `turn`, comparing only what was not compared yet."""
        tokens = self.sample.tokens
        for source, upto in reversed(self.session.pieces(turn, self._equal_upto)):
            for start, ids in ((source.shared, source.new_ids), (source.prompt_length, source.output_ids)):
                part = ids[: max(0, upto - start)]
                here = tokens[start : start + len(part)]
                if not np.array_equal(here, part):
                    return start + int(np.argmax(here != part))
            self._equal_upto[source.id] = max(upto, self._equal_upto.get(source.id, 0))
        return None

    def _same(self, kind: str, got: np.ndarray, want: np.ndarray, detail: str) -> None:
        if not np.array_equal(got, want):
            at = int(np.argmax(got != want))
            self._fail(kind, None, at, f"{detail} ({got[at]}, not {want[at]})")

    def _row(self) -> None:
        """The row ends with its leaf and says the truth of the path it is."""
        s, last = self.sample, self.sample.spans[-1]
        leaf = self.session.turns.get(last.turn_id)
        if leaf is None:
            return
        if len(s.tokens) != leaf.length:
            self._fail("tail", leaf.id, leaf.length, f"{len(s.tokens)} tokens, but its last turn ends at {leaf.length}")
        path = self.session.path(leaf.id)
        if s.prompt_length != self.session.turns[path[0]].prompt_length:
            self._fail(
                "prompt_length", path[0], s.prompt_length, "it is not where the first sampled token of the path is"
            )
        if {span.turn_id for span in s.spans} - set(path):
            self._fail("path", leaf.id, None, "it trains turns that its last turn does not descend from")
        if s.branch != leaf.branch:
            self._fail("branch", leaf.id, None, f"{s.branch!r}, but its last turn belongs to {leaf.branch!r}")
        later = [t.length for t in self.session.kept_children(leaf.id)]
        cut = [n for n in later if self.max_tokens is not None and n > self.max_tokens]
        if len(cut) < len(later):
            self._fail("leaf", leaf.id, None, "its last turn is continued by turns that fit")
        status = "truncated" if cut or leaf.finish_reason == "length" else "completed"
        if s.status != status:
            self._fail("status", leaf.id, None, f"{s.status!r}, but its last turn makes it {status!r}")
        if self.max_tokens is not None and len(s.tokens) > self.max_tokens:
            self._fail(
                "overlong", leaf.id, self.max_tokens, f"{len(s.tokens)} tokens do not fit into {self.max_tokens}"
            )
        if self.metadata is not None and not self.violations:
            self._metadata(leaf, len(path), cut=bool(cut))

    def _metadata(self, leaf: Turn, turns: int, *, cut: bool) -> None:
        """What the row says of its path, on which credit depends, and what it carries of its session."""
        fork = self.session.turns[self.sample.spans[0].turn_id].fork
        wanted: dict[str, Any] = {**(self.metadata or {}), "turns": turns}
        wanted |= {"fork": fork} if fork else {}
        wanted |= {"abandoned": True} if self.session.abandoned(leaf) else {}
        wanted |= {"cut": True} if cut else {}
        got = self.sample.metadata
        for name in sorted({*got, *wanted}):
            if got.get(name) != wanted.get(name) or (name in got) != (name in wanted):
                self._fail("metadata", leaf.id, None, f"{name} is {got.get(name)!r}, not {wanted.get(name)!r}")
