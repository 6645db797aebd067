"""Supervised rows: which episodes are chosen, what is labelled, what was said in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.format import load_chat_format
from sandlot.errors import ConfigError
from sandlot.trainers import Export, sft
from sandlot.trajectory.samples import linearize
from support.rows import make_row
from support.talk import RESULT, talk
from support.toy_model import make_toy_model


def test_what_was_said_is_in_messages_and_segments(tmp_path: Path) -> None:
    fmt = load_chat_format(make_toy_model(tmp_path))
    rows = linearize(talk(fmt).turns, episode_id="e", group_id="g", reward=1.0)
    main, side, anew = sft.rows(Export.of(rows, format=lambda: fmt))
    system, user, first, one, two, goes_on, second = main["messages"]
    assert [m["role"] for m in main["messages"]] == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert "Run a command" in system["content"]
    assert (user["content"], goes_on["content"], second["content"]) == ("List files.", "Go on.", "One.")
    assert [c["id"] for c in first["tool_calls"]] == [one["tool_call_id"], two["tool_call_id"]] == ["t0_0", "t0_1"]
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
    assert first["tool_calls"][1]["function"]["arguments"] == "no JSON"
    assert one["content"] == RESULT
    assert [m["role"] for m in side["messages"]] == ["user", "assistant"]
    assert [m["role"] for m in anew["messages"]] == ["context", "assistant"]
    for row, made in zip(rows, (main, side, anew), strict=True):
        assert "".join(s["text"] for s in made["segments"]) == fmt.decode(row.tokens.tolist())
        assert [s["label"] for s in made["segments"]] == [False, True] * len(row.spans)


def test_labels_are_the_trained_tokens_and_nothing_else() -> None:
    row = make_row("a", turns=[(3, 2), (2, 3)])
    (made,) = sft.rows(Export.of([row]))
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
    made = list(sft.rows(Export.of(rows, options={"min_reward": "0.5", "best_of": "1", "branches": "main,side"})))
    assert [r["metadata"]["episode_id"] for r in made] == ["a", "c"]
    with pytest.raises(ConfigError, match="min_reward is 'x'"):
        list(sft.rows(Export.of(rows, options={"min_reward": "x"})))
