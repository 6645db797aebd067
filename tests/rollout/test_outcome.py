"""What an ended agent run is called, by the gateway's record first."""

from __future__ import annotations

import pytest

from sandlot.errors import FailureKind as F
from sandlot.rollout.outcome import EpisodeResult, Evidence, failure_of


def seen(
    turns: int = 3,
    last_delivered: bool = True,
    engine_error: str = "",
    stopped_by: str = "",
    failure: F | None = None,
) -> Evidence:
    return Evidence(turns, last_delivered, engine_error, stopped_by, failure, "exit code 1")


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (seen(), None),
        (seen(failure=F.AGENT_ERROR), F.AGENT_ERROR),
        (seen(failure=F.AGENT_TIMEOUT), F.AGENT_TIMEOUT),
        # exit 0 with nothing sampled is never an accepted episode
        (seen(turns=0), F.INFRA_ERROR),
        (seen(turns=0, failure=F.AGENT_ERROR), F.INFRA_ERROR),
        # a stream that broke looks to the agent like an answer without calls
        (seen(last_delivered=False), F.INFRA_ERROR),
        (seen(engine_error="down"), F.INFRA_ERROR),
        (seen(engine_error="down", failure=F.AGENT_ERROR), F.INFRA_ERROR),
        (seen(stopped_by="turns (4)", failure=F.AGENT_ERROR), F.BUDGET),
        (seen(stopped_by="turns (4)"), F.BUDGET),
        (seen(stopped_by="context", failure=F.AGENT_ERROR), F.CONTEXT_OVERFLOW),
        (seen(stopped_by="context", failure=F.BUDGET), F.CONTEXT_OVERFLOW),
        # it compacted and went on to an ordinary end
        (seen(stopped_by="context"), None),
        (seen(turns=0, stopped_by="context", failure=F.AGENT_ERROR), F.CONTEXT_OVERFLOW),
        (seen(turns=0, failure=F.AGENT_TIMEOUT), F.AGENT_TIMEOUT),
    ],
)
def test_the_kind_of_failure(evidence: Evidence, kind: F | None) -> None:
    assert failure_of(evidence)[0] is kind


def test_a_row_without_reward_is_ungraded_and_not_failed() -> None:
    row = {
        "episode_id": "e", "reward": None, "failure": "grader_error", "violations": [], "turns": 1, "sampled_tokens": 2,
        "trained_tokens": 2, "samples": 1, "forks": 0, "metadata": {"task": "t", "harness": "h", "detail": "d"},
    }  # fmt: skip
    result = EpisodeResult.from_row(row)
    assert (result.state, result.failure, result.detail) == ("ungraded", F.GRADER_ERROR, "d")
    assert EpisodeResult.from_row({**row, "reward": 0.0, "failure": None}).state == "failed"
    assert EpisodeResult.from_row({**row, "reward": 1.0, "failure": None}).state == "solved"
