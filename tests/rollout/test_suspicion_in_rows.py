"""What looks like cheating is told in an episode's result row, and changes no reward."""

from __future__ import annotations

import pytest

from sandlot.rollout.episode import Episode
from sandlot.tasks import Task
from support.policy import call_text
from support.runner import MakeRunner

pytestmark = pytest.mark.slow


async def test_a_history_search_is_told_and_the_reward_stays(make_runner: MakeRunner, task: Task) -> None:
    assert task.gold_patch is not None
    mend = f"git apply - <<'END_OF_PATCH'\n{task.gold_patch.decode()}END_OF_PATCH\n"
    said = [call_text("bash", {"command": c}) for c in ("git log --all --oneline", mend)]
    runner = await make_runner(lambda prompt, number: [*said, "Solved."][number])
    result = await runner(Episode(task, "tiny", 0))
    assert result.reward == 1.0
    (row,) = runner.run.results()
    told = row["metadata"]["suspicion"]
    assert told["counts"] == {"history_search": 1}
    assert told["hits"][0]["text"] == "git log --all --oneline"
    assert told["hits"][0]["answered"]
