"""Journals of agents that rewrite their history: they grow with what is new, and give everything back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.errors import JournalError
from sandlot.trajectory import journal as journal_module
from sandlot.trajectory import repeats as repeats_module
from sandlot.trajectory.journal import JournalWriter, read_journal
from sandlot.trajectory.records import SessionRecord, TurnRecord
from sandlot.trajectory.repeats import Repeat, Sequences, remaining
from sandlot.trajectory.turn import Turn
from support.profiles import few
from support.sessions import SessionBuilder, make_turn

HEADER = SessionRecord(episode_id="e", group_id="g", created=1.0)
SOME = np.random.default_rng(7).integers(0, 150_000, 60_000).tolist()
HEAD, BODY, FRESH = SOME[:12_000], SOME[12_000:40_000], SOME[40_000:]


def journaled(path: Path, turns: Sequence[Turn]) -> list[int]:
    """Bytes that each turn adds to a journal, which is opened anew for each."""
    sizes = []
    for k, turn in enumerate(turns):
        with JournalWriter(path) as journal:
            if k == 0:
                journal.append(HEADER)
            before = path.stat().st_size
            journal.turn(turn)
            sizes.append(path.stat().st_size - before)
    return sizes


def assert_comes_back(path: Path, turns: Sequence[Turn]) -> None:
    for got, want in zip(read_journal(path).turns, turns, strict=True):
        assert got.new_ids.dtype == want.new_ids.dtype
        assert got.new_ids.tolist() == want.new_ids.tolist()


def test_a_rewritten_history_adds_what_is_new(tmp_path: Path) -> None:
    session = SessionBuilder()
    turn = session.root([*HEAD, *FRESH[:300], *BODY], [1, 2])
    for k in range(1, 6):  # another summary in the middle, the rest as it was
        turn = session.follow(turn, FRESH[1000 * k : 1000 * k + 50], [3, 4])
        summary = FRESH[1000 * k + 100 : 1000 * k + 400 + k]
        moved = session.full[turn.id][len(HEAD) + (300 if k == 1 else 299 + k) :]
        turn = session.root([*HEAD, *summary, *moved, 5 + k], [6])
    sizes = journaled(tmp_path / "e.jsonl.gz", session.turns)
    assert sizes[0] > 60_000
    assert max(sizes[1:]) < 2_000
    assert_comes_back(tmp_path / "e.jsonl.gz", session.turns)


def test_parts_of_several_branches_are_found_in_any_order(tmp_path: Path) -> None:
    session = SessionBuilder()
    session.root([*HEAD, *BODY], [1])
    session.root([*HEAD, *FRESH[:9000]], [2])
    session.root([*BODY[9000:20_000], 3, *FRESH[2000:8000], 4, *HEAD[100:], *BODY[:5000]], [5])
    sizes = journaled(tmp_path / "e.jsonl.gz", session.turns)
    assert sizes[2] < 1_000
    assert_comes_back(tmp_path / "e.jsonl.gz", session.turns)


def test_a_subagents_turn_does_not_hide_the_branch_beside_it(tmp_path: Path) -> None:
    session = SessionBuilder()
    main = session.root([*HEAD, *BODY], [1])
    session.root([9, 9, 9], [2], branch="subagent:a")
    session.root([*HEAD, 8, *session.full[main.id][len(HEAD) :]], [3])
    assert journaled(tmp_path / "e.jsonl.gz", session.turns)[2] < 1_000
    assert_comes_back(tmp_path / "e.jsonl.gz", session.turns)


@pytest.mark.parametrize("token", [0, 257, 0x01010101])
def test_one_token_again_and_again(tmp_path: Path, token: int) -> None:
    """Its bytes are found where no token begins, too."""
    session = SessionBuilder()
    session.root([token] * 30_000, [1])
    session.root([2, *[token] * 29_999, 3, *[token] * 5_001], [1])
    assert journaled(tmp_path / "e.jsonl.gz", session.turns)[1] < 2_000
    assert_comes_back(tmp_path / "e.jsonl.gz", session.turns)


def test_what_repeats_nothing_is_written_as_it_is(tmp_path: Path) -> None:
    session = SessionBuilder()
    session.root(HEAD, [1])
    session.root(BODY, [1])
    session.follow(session.turns[0], HEAD[:2000], [2])  # repeats, but is short
    journaled(tmp_path / "e.jsonl.gz", session.turns)
    records = [r for r, _ in journal_module._records((tmp_path / "e.jsonl.gz").read_bytes(), tmp_path)]
    assert [r.repeats for r in records if isinstance(r, TurnRecord)] == [[], [], []]
    assert_comes_back(tmp_path / "e.jsonl.gz", session.turns)


@pytest.mark.parametrize(
    "wrong",
    [
        [Repeat(0, "t9", 0, 2)],
        [Repeat(0, "t1", 0, 2)],
        [Repeat(0, "t0", 0, 5)],
        [Repeat(0, "t0", -1, 2)],
        [Repeat(0, "t0", 2, 2)],
        [Repeat(3, "t0", 0, 2)],
        [Repeat(-1, "t0", 0, 2)],
        [Repeat(1, "t0", 0, 2), Repeat(2, "t0", 0, 2)],
    ],
)
def test_a_repeat_of_what_is_not_there_is_damage(tmp_path: Path, wrong: list[Repeat]) -> None:
    path = tmp_path / "e.jsonl.gz"
    first, second = make_turn("t0", (1, 2, 3), (4,)), make_turn("t1", (7, 8), (9,))
    bad = msgspec.structs.replace(TurnRecord.of(second), repeats=wrong)
    with JournalWriter(path) as journal:
        journal.append(HEADER)
        journal.turn(first)
        end = path.stat().st_size
        with pytest.raises(JournalError, match="not there"):
            journal.append(bad)
        assert path.stat().st_size == end, "nothing of it was written"
        journal.turn(second)
    path.write_bytes(path.read_bytes()[:end] + journal_module._member(bad))
    with pytest.raises(JournalError, match=rf"damaged at byte {end}: a repeat of turn .* not there"):
        read_journal(path)


@few
@given(st.data())
def test_repeats_are_what_they_say(data: st.DataObject) -> None:
    tokens = st.lists(st.sampled_from((0, 1, 256, 2**31 - 1)), max_size=60)
    session = SessionBuilder()
    for _ in range(data.draw(st.integers(1, 4))):
        before = data.draw(st.sampled_from([None, *session.turns]))
        new, output = data.draw(tokens), data.draw(tokens.filter(len))
        if before is None:
            session.root(new or [1], output)
        else:
            session.fork(before, data.draw(st.integers(0, before.length)), new or [1], output)
    prompt: list[int] = []
    for _ in range(data.draw(st.integers(0, 5))):
        whole = session.full[data.draw(st.sampled_from(session.turns)).id]
        start = data.draw(st.integers(0, len(whole)))
        prompt += [*data.draw(tokens), *whole[start : data.draw(st.integers(start, len(whole)))]]
    turn = replace(make_turn("new", prompt or [1], (1,)))
    probe = data.draw(st.integers(1, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats_module, "_WORTH", 1)
        patch.setattr(repeats_module, "_PROBE", probe)
        patch.setattr(repeats_module, "_STRIDE", 16)
        earlier = Sequences(session.turns)
        found = earlier.repeats(turn)
    for each in session.turns:
        assert tuple(earlier.of(each.id)) == session.full[each.id]
    at = 0
    for repeat in found:
        assert at <= repeat.at
        at = repeat.end
        assert at - repeat.at >= probe
        assert tuple(turn.new_ids[repeat.at : at]) == session.full[repeat.turn][repeat.start : repeat.stop]
    rest = remaining(turn.new_ids, found)
    assert len(rest) + sum(r.stop - r.start for r in found) == len(turn.new_ids)
    assert earlier.restored(rest.tolist(), found).tolist() == turn.new_ids.tolist()
