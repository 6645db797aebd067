"""The token contract on random sessions, against slow and obvious answers."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandlot.trajectory import repeats
from sandlot.trajectory.audit import audit
from sandlot.trajectory.journal import JournalWriter, read_journal
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.samples import kept_turns, linearize
from sandlot.trajectory.store import read_samples, write_samples
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import ids_sha256
from support.sessions import SessionBuilder, oracle_kept, oracle_parents, oracle_rows, sessions

# Tests that write files: the disk is slow, and the content is compared elsewhere as often as the profile says.
on_disk = settings(max_examples=max(50, settings().max_examples // 10))

limits = st.one_of(st.none(), st.integers(1, 40))


@given(sessions())
def test_the_tree_finds_the_parents_and_gives_every_sequence(session: SessionBuilder) -> None:
    tree = SessionTree()
    found = {t.id: tree.add(t) for t in session.turns}
    assert found == oracle_parents(session)
    for turn in session.turns:
        assert tuple(tree.ids(turn.id)) == session.full[turn.id]
        assert tuple(tree.prompt_ids(turn.id)) == session.prompts[turn.id]
        assert ids_sha256(tree.prompt_ids(turn.id)) == turn.prompt_sha256
        assert list(tree.children(turn.id)) == [c for c, p in found.items() if p == turn.id]
    assert kept_turns(tree) == oracle_kept(session)


@given(sessions(), limits)
def test_samples_are_the_obvious_ones_and_pass_the_audit(session: SessionBuilder, max_tokens: int | None) -> None:
    samples = linearize(
        session.turns, episode_id="e", group_id="g", reward=0.5, metadata={"task": "x"}, max_tokens=max_tokens
    )
    rows = oracle_rows(session, max_tokens)
    assert [tuple(s.tokens) for s in samples] == [tokens for tokens, _, _ in rows]
    assert [s.loss_mask.tolist() for s in samples] == [mask for _, mask, _ in rows]
    assert [[span.turn_id for span in s.spans] for s in samples] == [own for _, _, own in rows]
    report = audit(session.turns, samples, max_tokens=max_tokens)
    report.raise_for_violations()
    kept = [t for t in session.turns if t.id in oracle_kept(session)]
    fitting = [t for t in kept if max_tokens is None or t.length <= max_tokens]
    assert report.trained == report.kept == sum(len(t.output_ids) for t in fitting)
    assert report.undelivered == len(session.turns) - len(kept)
    assert report.cut == len(kept) - len(fitting)


@given(sessions(min_turns=1))
def test_rows_that_are_left_out_take_no_turn_with_them_that_others_could_train(session: SessionBuilder) -> None:
    """Rows that were abandoned, of other branches, and then those that were cut: what remains trains its whole path."""
    rows = linearize(session.turns, episode_id="e", group_id="g")
    tree = SessionTree(session.turns)
    for branch, cut_too in itertools.product({t.branch for t in session.turns}, (False, True)):
        left = [r for r in rows if "abandoned" not in r.metadata and r.branch == branch]
        left = [r for r in left if not cut_too or r.status == "completed"]
        trained = {span.turn_id for r in left for span in r.spans}
        for row in left:
            assert {t for t in tree.path(row.spans[-1].turn_id) if tree[t].branch == branch} <= trained


@given(sessions())
def test_every_sampled_token_of_kept_turns_is_trained_once_with_its_own_logprob(session: SessionBuilder) -> None:
    samples = linearize(session.turns, episode_id="e", group_id="g")
    turns = {t.id: t for t in session.turns}
    seen: Counter[tuple[str, int]] = Counter()
    for sample in samples:
        assert len(sample.tokens) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.weight_versions)
        for start, turn_id, offset, length in sample.spans:
            turn = turns[turn_id]
            assert tuple(sample.tokens[:start]) == session.full[turn_id][: turn.prompt_length + offset]
            for k in range(length):
                assert sample.logprobs[start + k] == np.float32(turn.logprobs[offset + k])
                version = next(v for v, a, b in turn.versions if a <= offset + k < b)
                assert sample.weight_versions[start + k] == version
                seen[turn_id, offset + k] += 1
        assert sample.loss_mask.sum() == sum(span.length for span in sample.spans)
        assert {v for v, m in zip(sample.weight_versions, sample.loss_mask, strict=True) if not m} <= {""}
    wanted = {(t.id, k) for t in session.turns if t.id in oracle_kept(session) for k in range(len(t.output_ids))}
    assert seen == Counter(wanted)


@on_disk
@given(session=sessions(), late=st.data(), finely=st.booleans())
def test_a_journal_gives_back_the_session_bit_for_bit(tmp_path_factory, session: SessionBuilder, late, finely) -> None:
    """`finely`: repeats of a token or two are told as well, since random sessions are short."""
    with pytest.MonkeyPatch.context() as patch:
        if finely:
            patch.setattr(repeats, "_WORTH", 1)
            patch.setattr(repeats, "_PROBE", late.draw(st.integers(1, 2)))
        _through_a_journal(tmp_path_factory.mktemp("j") / "e.jsonl.gz", session, late)


def _through_a_journal(path: Path, session: SessionBuilder, late: st.DataObject) -> None:
    now_delivered = set()
    with JournalWriter(path) as journal:
        journal.append(SessionRecord(episode_id="é/1", group_id="g", metadata={"n": 1}))
        for turn in session.turns:
            journal.turn(turn)
            if not turn.delivered and late.draw(st.booleans()):
                journal.delivered(turn.id)
                now_delivered.add(turn.id)
        journal.append(SealedRecord(reward=0.25))
    content = read_journal(path)
    assert content.header is not None
    assert content.header.episode_id == "é/1"
    assert content.sealed is not None
    assert content.sealed.reward == 0.25
    assert not content.torn
    assert len(content.turns) == len(session.turns)
    for got, want in zip(content.turns, session.turns, strict=True):
        assert got.delivered == (want.delivered or want.id in now_delivered)
        for name in ("new_ids", "output_ids", "logprobs"):
            a, b = getattr(got, name), getattr(want, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
        for name in ("id", "parent", "shared", "finish_reason", "prompt_sha256", "prompt_length", "versions", "branch"):
            assert getattr(got, name) == getattr(want, name)
        assert (got.sampling, got.model, got.created, got.fork) == (want.sampling, want.model, want.created, want.fork)


@on_disk
@given(sessions(min_turns=1))
def test_parquet_gives_back_the_samples_bit_for_bit(tmp_path_factory, session: SessionBuilder) -> None:
    path = tmp_path_factory.mktemp("p") / "e.parquet"
    samples = linearize(session.turns, episode_id="e", group_id="g", reward=1.0, metadata={"a": [1, None, "é"]})
    write_samples(path, samples)
    back = list(read_samples(path))
    assert len(back) == len(samples)
    for got, want in itertools.zip_longest(back, samples):
        for name in ("tokens", "loss_mask", "logprobs"):
            a, b = getattr(got, name), getattr(want, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
        for name in ("episode_id", "index", "branch", "weight_versions", "spans", "prompt_length", "reward", "status"):
            assert getattr(got, name) == getattr(want, name)
        assert (got.advantage, got.loss_weight, got.metadata) == (want.advantage, want.loss_weight, want.metadata)
    audit(session.turns, back).raise_for_violations()
