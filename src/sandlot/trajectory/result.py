"""From a sealed journal to an episode's samples and its result row: pure, so it can be done again at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandlot.errors import FailureKind, JournalError
from sandlot.trajectory.audit import AuditReport, Violation, audit_journal
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.samples import linearize

WITHOUT_SAMPLES = frozenset({FailureKind.ABORTED, FailureKind.INFRA_ERROR})
"""Episodes that ended like this say nothing about the policy and give no sample."""


def episode_samples(content: JournalContent) -> list[Sample]:
    """The samples of a journal; none when it is not sealed or its episode was aborted or broke."""
    header, sealed = content.header, content.sealed
    if header is None or sealed is None or sealed.failure in WITHOUT_SAMPLES:
        return []
    return linearize(
        content.turns,
        episode_id=header.episode_id,
        group_id=content.group_id,
        reward=sealed.reward,
        metadata=header.metadata,
        max_tokens=header.max_tokens,
    )


def complete_episode(content: JournalContent) -> tuple[dict[str, Any], list[Sample]]:
    """The result row and the audited samples of a sealed journal.

    When the audit refuses the samples there are none, and the row has the failure `infra_error` and the violations.
    """
    try:
        samples = episode_samples(content)
        report = audit_journal(content, samples)
        refused = [str(v) for v in report.violations]
    except JournalError as e:
        samples, report, refused = [], AuditReport(()), [str(e)]
    if refused:
        samples, report = [], replace(report, trained=0, samples=0)
    return _row(content, report, refused), samples


def row_violations(row: Mapping[str, Any], content: JournalContent, proven: AuditReport) -> tuple[Violation, ...]:
    """Where the result row of an episode says something else than its journal and what was `proven` of its samples."""
    if content.sealed is None:
        return (Violation("result", detail="there is a result, and the journal says that the episode is not over"),)
    own = complete_episode(content)[0] if row.get("violations") else _row(content, proven, [])
    differing = [name for name in sorted({*row, *own}) if _differs(name, row, own)]
    return tuple(Violation("result", detail=f"{name} is not what the journal gives") for name in differing)


def _differs(name: str, row: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    if name == "violations":  # how they are worded is no evidence
        return bool(row.get(name)) != bool(own.get(name))
    return name not in row or name not in own or row[name] != own[name]


def _row(content: JournalContent, report: AuditReport, refused: list[str]) -> dict[str, Any]:
    header, sealed = content.header, content.sealed
    if header is None or sealed is None:
        raise JournalError("the journal is not sealed; the episode is not over")
    return {
        "episode_id": header.episode_id,
        "group_id": content.group_id,
        "reward": sealed.reward if not refused else None,
        "failure": sealed.failure if not refused else str(FailureKind.INFRA_ERROR),
        "turns": len(content.turns),
        "sampled_tokens": report.sampled,
        "trained_tokens": report.trained,
        "samples": report.samples,
        "forks": sum(1 for t in content.turns if t.fork),
        "undelivered": report.undelivered,
        "cut": report.cut,
        "violations": refused,
        "verdict": sealed.verdict,
        "created": header.created,
        "finished": sealed.time,
        "metadata": {**header.metadata, **sealed.metadata},
    }
