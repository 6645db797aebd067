"""ATIF trajectories from journals: what was said in them, and what the schema forbids."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Message
from sandlot.trainers import TrainerDataError, atif
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.records import SealedRecord, SessionRecord
from support.sessions import SessionBuilder
from support.talk import RESULT, talk
from support.toy_model import make_toy_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def journal(builder: SessionBuilder, **sealed: Any) -> JournalContent:
    header = SessionRecord(episode_id="e", group_id="g", metadata={"harness": "pi", "task": "t"})
    return JournalContent(header, builder.turns, frozenset(), [], SealedRecord(**{"reward": 1.0, **sealed}), False)


def session() -> SessionBuilder:
    """Two turns of the main conversation, a sub-agent between them, then a compacted history."""
    builder = SessionBuilder()
    first = builder.root((1, 2, 3), (4, 5))
    builder.root((9, 8), (7,), branch="subagent:a")
    builder.follow(first, (6,), (10, 11), finish_reason="length")
    builder.root((1, 20), (21,), fork="history compacted")
    return builder


def test_a_journal_becomes_a_tree_of_trajectories() -> None:
    root = atif.trajectory(journal(session()))
    assert (root["schema_version"], root["session_id"], root["trajectory_id"]) == ("ATIF-v1.8", "e", "e/main")
    assert [step["source"] for step in root["steps"]] == ["agent"] * 3
    assert [step["step_id"] for step in root["steps"]] == [1, 2, 3]
    second, third = root["steps"][1:]
    assert second["metrics"]["completion_token_ids"] == [10, 11]
    assert second["metrics"]["prompt_tokens"] == 6
    assert len(second["metrics"]["logprobs"]) == 2
    assert second["extra"]["weight_versions"] == [["v1", 0, 2]]
    assert [second["extra"][name] for name in ("after_turn", "shared_tokens", "new_prompt_ids")] == ["t0", 5, [6]]
    assert third["extra"]["fork"] == "history compacted"
    (sub,) = root["subagent_trajectories"]
    assert (sub["trajectory_id"], len(sub["steps"])) == ("e/subagent:a", 1)
    assert root["extra"]["reward"] == 1.0
    assert root["final_metrics"] == {"total_prompt_tokens": 11, "total_completion_tokens": 5, "total_steps": 3}


def test_every_sampled_token_is_in_one_step() -> None:
    builder = session()
    root = atif.trajectory(journal(builder))
    steps = [s for part in (root, *root["subagent_trajectories"]) for s in part["steps"] if s["source"] == "agent"]
    found = {s["extra"]["turn_id"]: s["metrics"]["completion_token_ids"] for s in steps}
    assert found == {t.id: t.output_ids.tolist() for t in builder.turns}


def test_what_was_said_is_read_from_the_ids(model_dir: Path) -> None:
    root = atif.trajectory(journal(talk(load_chat_format(model_dir))), load_chat_format(model_dir))
    system, user, first, goes_on, second, anew, last = root["steps"]
    assert [s["source"] for s in root["steps"]] == ["system", "user", "agent", "user", "agent", "user", "agent"]
    assert system["message"].startswith("Be brief.")
    assert "Run a command" in system["message"]
    assert [s["message"] for s in (user, goes_on, second, last)] == ["List files.", "Go on.", "One.", "Bye."]
    assert first["message"].strip() == "Looking."
    assert first["tool_calls"] == [
        {"tool_call_id": "t0_0", "function_name": "bash", "arguments": {"command": "ls"}},
        {"tool_call_id": "t0_1", "function_name": "bash", "arguments": {"unparsed_arguments": "no JSON"}},
    ]
    assert first["observation"] == {
        "results": [
            {"source_call_id": "t0_0", "content": RESULT},
            {"source_call_id": "t0_1", "content": "bash: no"},
        ]
    }
    assert "<|im_start|>assistant\nOne." in anew["message"]  # a history that was rendered anew stays as it was shown
    (side,) = root["subagent_trajectories"]
    assert [(s["source"], s["message"]) for s in side["steps"]] == [("user", "Give it a title."), ("agent", "Files")]


def test_results_that_came_twice_are_observed_once(model_dir: Path) -> None:
    fmt = load_chat_format(model_dir)
    builder = talk(fmt)
    first = builder.turns[0]
    again = fmt.extend(first.output_ids.tolist(), ["bash", "bash"], [Message("tool", "x"), Message("tool", "y")], ())
    builder.follow(first, again or [], [5, fmt.stop_token_ids[0]], fork="the last turn was asked for again")
    steps = atif.trajectory(journal(builder), fmt)["steps"]
    assert [r["content"] for r in steps[2]["observation"]["results"]] == [RESULT, "bash: no"]
    assert [(s["source"], s["message"]) for s in steps[-3:-1]] == [("user", "x"), ("user", "y")]


@pytest.mark.slow
def test_harbors_own_models_take_the_trajectories(model_dir: Path) -> None:
    name = "harbor.models.trajectories"
    own = pytest.importorskip(name, reason="harbor is not installed here", exc_type=ImportError)
    fmt = load_chat_format(model_dir)
    for root in (atif.trajectory(journal(session())), atif.trajectory(journal(talk(fmt)), fmt)):
        read = own.Trajectory.model_validate(root)
        assert _without_none(read.to_json_dict()) == _without_none(root)
        for change in (step(step_id=9), whole(more=1), step(observation={"results": [{"source_call_id": "b"}]})):
            document = copy.deepcopy(root)
            change(document)
            with pytest.raises(ValueError, match=r"step_id|extra|source_call_id"):
                own.Trajectory.model_validate(document)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def step(**change: Any) -> Any:
    """A document whose last step, one of the agent, is changed."""

    def apply(document: dict[str, Any]) -> None:
        document["steps"][-1] |= change

    return apply


def whole(**change: Any) -> Any:
    return lambda document: document.update(change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (whole(schema_version="ATIF-v1.7"), "schema_version"),
        (whole(more=1), "unknown key 'more'"),
        (whole(trajectory_id="e/subagent:a"), "unique"),
        (whole(agent={"name": "x"}), "no version"),
        (step(step_id=7), "count from 1"),
        (step(more=1), "unknown key 'more'"),
        (step(source="tool"), "its source"),
        (step(message=None), "neither text nor parts"),
        (step(source="user"), "only agents have model_name"),
        (step(llm_call_count=0), "no model was called"),
        (step(metrics={"tokens": 1}), "unknown metric"),
        (step(metrics={"completion_token_ids": [1, 2], "completion_tokens": 3}), "their count differ"),
        (step(metrics={"completion_token_ids": [1, 2], "completion_tokens": 2, "logprobs": [0.0]}), "count differ"),
        (step(tool_calls=[{"tool_call_id": "a", "arguments": "x"}]), "no object"),
        (step(tool_calls=[{"tool_call_id": "a", "arguments": {}}] * 2), "one id"),
        (step(observation={"results": [{"source_call_id": "b"}]}), "no call of this step"),
    ],
)
def test_the_schema_is_kept(change: Any, why: str) -> None:
    document = copy.deepcopy(atif.trajectory(journal(session())))
    atif.validate(document)
    change(document)
    with pytest.raises(TrainerDataError, match=why):
        atif.validate(document)
