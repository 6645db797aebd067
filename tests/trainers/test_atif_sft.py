"""ATIF trajectories from journals, and supervised rows: what is chosen, what is said, what the schema forbids."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Message, Tool
from sandlot.errors import ConfigError
from sandlot.trainers import Export, TrainerDataError, atif, sft
from sandlot.trainers.spoken import spoken
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.samples import linearize
from support.policy import call_text, encode_control
from support.rows import make_row
from support.sessions import SessionBuilder
from support.toy_model import make_toy_model

BASH = Tool("bash", "Run a command", {"type": "object", "properties": {"command": {"type": "string"}}})


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


# -- ATIF -------------------------------------------------------------------------------------------------------------


def test_a_journal_becomes_a_tree_of_trajectories() -> None:
    root = atif.trajectory(journal(session()))
    assert (root["schema_version"], root["session_id"], root["trajectory_id"]) == ("ATIF-v1.8", "e", "e/main")
    assert [step["source"] for step in root["steps"]] == ["user", "agent", "user", "agent", "user", "agent"]
    assert [step["step_id"] for step in root["steps"]] == [1, 2, 3, 4, 5, 6]
    second = root["steps"][3]
    assert second["metrics"]["completion_token_ids"] == [10, 11]
    assert second["metrics"]["prompt_tokens"] == 6
    assert len(second["metrics"]["logprobs"]) == 2
    assert second["extra"]["weight_versions"] == [["v1", 0, 2]]
    assert root["steps"][2]["extra"] == {"token_ids": [6], "after_turn": "t0", "shared_tokens": 5}
    assert root["steps"][4]["extra"]["fork"] == "history compacted"
    (sub,) = root["subagent_trajectories"]
    assert (sub["trajectory_id"], len(sub["steps"])) == ("e/subagent:a", 2)
    assert root["extra"]["reward"] == 1.0
    assert root["final_metrics"] == {"total_prompt_tokens": 11, "total_completion_tokens": 5, "total_steps": 6}


def test_every_sampled_token_is_in_one_step() -> None:
    builder = session()
    root = atif.trajectory(journal(builder))
    steps = [s for part in (root, *root["subagent_trajectories"]) for s in part["steps"] if s["source"] == "agent"]
    found = {s["extra"]["turn_id"]: s["metrics"]["completion_token_ids"] for s in steps}
    assert found == {t.id: t.output_ids.tolist() for t in builder.turns}


def test_what_was_said_is_parsed_from_the_ids(model_dir: Path) -> None:
    fmt = load_chat_format(model_dir)
    prompt = fmt.render((Message("user", "List files."),), (BASH,))
    output = [*encode_control(fmt, call_text("bash", {"command": "ls"}, before="Looking. ")), fmt.stop_token_ids[0]]
    builder = SessionBuilder()
    builder.root(prompt, output)
    root = atif.trajectory(journal(builder), fmt)
    user, agent = root["steps"]
    assert "List files." in user["message"]
    assert agent["message"].strip() == "Looking."
    assert agent["tool_calls"] == [{"tool_call_id": "t0_0", "function_name": "bash", "arguments": {"command": "ls"}}]
    (row,) = linearize(builder.turns, episode_id="e", group_id="g", reward=1.0)
    context, said = spoken(row, fmt)
    assert context["role"] == "context"
    assert said["tool_calls"][0]["function"] == {"name": "bash", "arguments": {"command": "ls"}}
    (labelled,) = sft.rows(Export([row], model=model_dir))
    assert [s["label"] for s in labelled["segments"]] == [False, True]
    assert "".join(s["text"] for s in labelled["segments"]) == fmt.decode(row.tokens.tolist())


def step(**change: Any) -> Any:
    """A document whose second step, the agent's first, is changed."""

    def apply(document: dict[str, Any]) -> None:
        document["steps"][1] |= change

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


# -- supervised rows --------------------------------------------------------------------------------------------------


def test_labels_are_the_trained_tokens_and_nothing_else() -> None:
    row = make_row("a", turns=[(3, 2), (2, 3)])
    (made,) = sft.rows(Export([row]))
    assert [label == sft.IGNORED for label in made["labels"]] == [m == 0 for m in row.loss_mask.tolist()]
    assert [a for a in made["labels"] if a != sft.IGNORED] == row.tokens[row.loss_mask == 1].tolist()
    assert "segments" not in made


def test_the_best_of_each_group_and_nothing_cut_or_abandoned() -> None:
    rows = [
        make_row("long", "g", turns=[(3, 9)]),
        make_row("short", "g", turns=[(3, 2)]),
        make_row("short", "g", index=1, metadata={"abandoned": True}),
        make_row("short", "g", index=2, branch="side"),
        make_row("half", "g", reward=0.5),
        make_row("none", "g", reward=None),
        make_row("cut", "h", status="truncated"),
        make_row("only", "i", reward=0.5),
    ]

    def chosen(**options: Any) -> list[tuple[str, int]]:
        return [(s.episode_id, s.index) for s in sft.Selection(**options)(rows)]

    assert chosen() == [("long", 0), ("short", 0), ("short", 2)]
    assert chosen(best_of=1) == [("long", 0)]  # 9 trained tokens; the other has 12 in its three rows
    assert chosen(min_reward=0.5, best_of=1)[-1] == ("only", 0)
    assert chosen(max_tokens=5) == [("short", 0)]
    assert chosen(branches=("side",)) == [("short", 2)]


def test_of_equal_rewards_the_shorter_wins_whatever_the_order() -> None:
    rows = [make_row("a", turns=[(3, 9)]), make_row("b", turns=[(3, 2)]), make_row("c", turns=[(3, 2)])]
    for order in (rows, rows[::-1]):
        assert [s.episode_id for s in sft.Selection(best_of=1)(order)] == ["b"]


def test_options_come_as_text() -> None:
    rows = [make_row("a"), make_row("b", reward=0.5), replace(make_row("c"), group_id="h")]
    made = sft.rows(Export(rows, options={"min_reward": "0.5", "best_of": "1", "branches": "main,side"}))
    assert [r["metadata"]["episode_id"] for r in made] == ["a", "c"]
    with pytest.raises(ConfigError, match="min_reward is 'x'"):
        sft.rows(Export(rows, options={"min_reward": "x"}))
