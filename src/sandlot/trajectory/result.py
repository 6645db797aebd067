"""From a sealed journal to an episode's samples and its result row: pure, so it can be done again at any time."""

from __future__ import annotations

from typing import Any

from sandlot.errors import FailureKind, JournalError
from sandlot.trajectory.audit import AuditReport, audit_journal
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
        group_id=header.group_id,
        reward=sealed.reward,
        metadata=header.metadata,
        max_tokens=header.max_tokens,
    )


def complete_episode(content: JournalContent) -> tuple[dict[str, Any], list[Sample]]:
    """The result row and the audited samples of a sealed journal.

    When the audit refuses the samples there are none, and the row has the failure `infra_error` and the violations.
    """
    header, sealed = content.header, content.sealed
    if header is None or sealed is None:
        raise JournalError("the journal is not sealed; the episode is not over")
    failure, refused = sealed.failure, []
    try:
        samples = episode_samples(content)
        report = audit_journal(content, samples)
        refused = [str(v) for v in report.violations]
    except JournalError as e:
        report, refused = AuditReport(()), [str(e)]
    if refused:
        samples, failure = [], str(FailureKind.INFRA_ERROR)
    row = {
        "episode_id": header.episode_id,
        "group_id": header.group_id,
        "reward": sealed.reward if not refused else None,
        "failure": failure,
        "turns": len(content.turns),
        "sampled_tokens": report.sampled,
        "trained_tokens": report.trained if samples else 0,
        "samples": len(samples),
        "forks": sum(1 for t in content.turns if t.fork),
        "undelivered": report.undelivered,
        "cut": report.cut,
        "violations": refused,
        "verdict": sealed.verdict,
        "created": header.created,
        "finished": sealed.time,
        "metadata": {**header.metadata, **sealed.metadata},
    }
    return row, samples
