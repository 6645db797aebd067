"""Samples from known sessions: what is trained, what is context, what is left out."""

import time

import numpy as np
import pytest

from sandlot.errors import JournalError
from sandlot.ids import ids_array
from sandlot.trajectory.audit import audit
from sandlot.trajectory.sample import Sample, Span
from sandlot.trajectory.samples import linearize
from sandlot.trajectory.turn import Turn, ids_sha256
from support.sessions import SessionBuilder, make_turn


def rows(session: SessionBuilder, **options: object) -> list[Sample]:
    samples = linearize(session.turns, episode_id="e", group_id="g", reward=1.0, **options)  # type: ignore[arg-type]
    audit(session.turns, samples, max_tokens=options.get("max_tokens")).raise_for_violations()  # type: ignore[arg-type]
    return samples


def trained(sample: Sample) -> list[int]:
    return sample.tokens[sample.loss_mask == 1].tolist()


def test_one_conversation_is_one_sample_with_exactly_the_sampled_tokens_trained() -> None:
    """c01, d05: whatever the template puts around them, exactly the sampled ids have mask 1."""
    nl, user, header, eos = 5, 6, 7, 8
    s = SessionBuilder()
    t0 = s.root((1, 2), (40, 41, eos), logprobs=(-0.5, -0.25, -0.125))
    s.follow(t0, (nl, user, header), (42, eos), logprobs=(-2.0, 0.0))
    (sample,) = rows(s, metadata={"task": "t"})
    assert sample.tokens.tolist() == [1, 2, 40, 41, eos, nl, user, header, 42, eos]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -0.25, -0.125, 0, 0, 0, -2.0, 0.0]
    assert sample.weight_versions == ("", "", "v1", "v1", "v1", "", "", "", "v1", "v1")
    assert sample.spans == (Span(2, "t0", 0, 3), Span(8, "t1", 0, 2))
    assert (sample.prompt_length, sample.status, sample.index, sample.branch) == (2, "completed", 0, "main")
    assert (sample.reward, sample.advantage, sample.loss_weight) == (1.0, None, 1.0)
    assert sample.metadata == {"task": "t", "turns": 2}


def test_an_end_token_that_the_template_adds_back_is_not_trained() -> None:
    """d05: the engine stripped the end token, the template writes it again: it is in the prompt, so mask 0."""
    s = SessionBuilder()
    t0 = s.root((1, 2), (40, 41))
    s.follow(t0, (8, 5, 6), (42,))
    (sample,) = rows(s)
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]


def test_drift_costs_no_sampled_token() -> None:
    """One token of a long answer changes in the history: a fork, and all 5,000 stay trained."""
    s = SessionBuilder()
    t0 = s.root((1, 2), range(100, 5_100))
    s.fork(t0, t0.length - 1, (9, 10), (11,))
    first, second = rows(s)
    assert len(trained(first)) == 5_000
    assert trained(second) == [11]
    assert first.metadata == {"turns": 1}
    assert second.metadata == {"turns": 1, "fork": "history edited"}


def test_a_shared_stretch_is_trained_by_the_first_leaf_in_the_order_of_turns() -> None:
    s = SessionBuilder()
    t0 = s.root((1,), (10,))
    t1 = s.follow(t0, (2,), (11,))
    s.follow(t0, (3,), (12,))
    s.follow(t1, (4,), (13,))
    first, second = rows(s)
    assert first.tokens.tolist() == [1, 10, 3, 12]
    assert trained(first) == [10, 12]
    assert second.tokens.tolist() == [1, 10, 2, 11, 4, 13]
    assert trained(second) == [11, 13]
    assert second.prompt_length == 1


def test_a_token_that_was_sampled_twice_counts_twice() -> None:
    """Repeated identical outputs are two turns, not one."""
    s = SessionBuilder()
    t0 = s.root((1,), (7, 7))
    t1 = s.follow(t0, (), (7, 7))
    s.follow(t1, (7,), (7, 7))
    (sample,) = rows(s)
    assert sample.loss_mask.tolist() == [0, 1, 1, 1, 1, 0, 1, 1]


def test_a_request_repeated_on_purpose_is_a_branch_of_its_own() -> None:
    """h04 (3): the same body again, later, is a new generation and both are trained; the abandoned one says so.

    Its row holds nothing else, so that leaving it out loses nothing else.
    """
    s = SessionBuilder()
    t0 = s.root((1, 2), (3,))
    s.follow(t0, (4,), (5,))
    t2 = s.follow(t0, (4,), (6,))
    s.follow(t2, (7,), (8,))
    first, second = rows(s)
    assert (trained(first), trained(second)) == ([5], [3, 6, 8])
    assert first.metadata["abandoned"] is True
    assert "abandoned" not in second.metadata


@pytest.mark.parametrize("branch", ["side", "subagent:a"])
def test_a_conversation_trains_its_own_turns(branch: str) -> None:
    """A side call and a sub-agent that go on from the whole history come first, and take nothing of it."""
    s = SessionBuilder()
    t0 = s.root((1, 2), (3,))
    t1 = s.follow(t0, (4,), (5,))
    t2 = s.follow(t1, (6,), (7,), branch=branch)
    s.follow(t2, (8,), (9,), branch=branch)
    s.follow(t1, (10,), (11,))
    first, second = rows(s)
    assert (first.branch, trained(first)) == (branch, [7, 9])
    assert (second.branch, trained(second)) == ("main", [3, 5, 11])


def test_an_answer_that_was_cut_takes_no_history_with_it() -> None:
    s = SessionBuilder()
    t0 = s.root((1, 2), (3,))
    s.follow(t0, (4,), (5,), finish_reason="length")
    s.follow(t0, (6,), (7,))
    first, second = rows(s)
    assert (first.status, trained(first)) == ("truncated", [5])
    assert (second.status, trained(second)) == ("completed", [3, 7])


def test_what_only_another_branch_goes_on_from_is_trained_there() -> None:
    s = SessionBuilder()
    t0 = s.root((1, 2), (3,))
    s.follow(t0, (4,), (5,), branch="side")
    s.follow(t0, (4,), (6,), branch="subagent:a")
    first, second = rows(s)
    assert (trained(first), trained(second)) == ([3, 5], [6])


def test_only_an_answer_that_nothing_came_after_is_abandoned() -> None:
    s = SessionBuilder()
    t0 = s.root((1,), (2,))
    t1 = s.root((1,), (3,))
    s.follow(t0, (4,), (5, 6, 7))
    s.follow(t1, (4,), (8,))
    first, second = rows(s, max_tokens=4)
    assert first.metadata == {"turns": 1, "cut": True}
    assert second.metadata == {"turns": 2}
    s.root((1,), (9,))
    assert ["abandoned" in x.metadata for x in rows(s)] == [False, False, True]


def test_an_answer_nobody_had_is_left_out_and_counted() -> None:
    """slime trains the retried request twice; here the answer that was never delivered is not trained."""
    s = SessionBuilder()
    s.root((1, 2), (3,), delivered=False)
    t1 = s.root((1, 2), (4,))
    s.follow(t1, (5,), (6,))
    (sample,) = rows(s)
    assert trained(sample) == [4, 6]
    report = audit(s.turns, [sample])
    assert (report.undelivered, report.sampled, report.trained) == (1, 3, 2)


def test_an_answer_that_was_continued_was_evidently_had() -> None:
    """The note of the delivery was lost in a crash, but the next prompt contains the answer."""
    s = SessionBuilder()
    t0 = s.root((1, 2), (3,), delivered=False)
    s.follow(t0, (5,), (6,), delivered=False)
    (sample,) = rows(s)
    assert trained(sample) == [3]
    assert sample.tokens.tolist() == [1, 2, 3]


def test_a_session_without_turns_or_without_a_delivered_one_gives_nothing() -> None:
    assert linearize([], episode_id="e", group_id="g", reward=0.0) == []
    lost = [make_turn("t0", (1,), (2,), delivered=False)]
    assert linearize(lost, episode_id="e", group_id="g", reward=0.0) == []


def test_too_long_is_cut_at_whole_turns() -> None:
    s = SessionBuilder()
    t0 = s.root((1, 2), (3, 4))  # 4 tokens
    t1 = s.follow(t0, (5,), (6, 7))  # 7
    t2 = s.follow(t1, (8,), (9,))  # 9
    s.follow(t2, (8,), (10,))  # 11
    s.follow(t1, (11, 12), (13,))  # 10
    for limit, want in ((11, [[3, 4, 6, 7, 9, 10], [13]]), (10, [[3, 4, 6, 7, 9], [13]]), (8, [[3, 4, 6, 7]])):
        got = rows(s, max_tokens=limit)
        assert [trained(x) for x in got] == want
        assert all(len(x.tokens) <= limit for x in got)
    cut, whole = rows(s, max_tokens=10)
    assert (cut.status, cut.metadata["cut"], whole.status) == ("truncated", True, "completed")
    assert rows(s, max_tokens=3) == []


def test_an_answer_cut_by_its_length_is_truncated_only_where_it_is_last() -> None:
    s = SessionBuilder()
    t0 = s.root((1,), (2,), finish_reason="length")
    assert [x.status for x in rows(s)] == ["truncated"]
    s.follow(t0, (3,), (4,))
    assert [x.status for x in rows(s)] == ["completed"]


def test_a_turn_without_its_logprobs_is_refused_and_never_padded() -> None:
    """d04: five ids with four logprobs, or one logprob that numpy would spread over all of them."""
    for logprobs in ((-1.0,) * 4, (-1.0,), ()):
        turn = make_turn("t0", (1,), (2, 3, 4, 5, 6), logprobs=logprobs)
        with pytest.raises(JournalError, match=f"5 sampled tokens and {len(logprobs)} logprobs"):
            linearize([turn], episode_id="e", group_id="g")


def test_ungraded_is_none_and_not_zero() -> None:
    (sample,) = linearize([make_turn("t0", (1,), (2,))], episode_id="e", group_id="g")
    assert sample.reward is None


def big_session(fork_every: int) -> list[Turn]:
    """200 turns, about 170,000 tokens."""
    random = np.random.default_rng(1)
    turns: list[Turn] = []
    full = ids_array([])
    for k in range(200):
        fork = bool(fork_every and k and k % fork_every == 0)
        shared = len(full) - (200 if fork else 0)
        new = ids_array(random.integers(0, 150_000, 610 if k else 12_500))
        prompt = np.concatenate([full[:shared], new])
        output = ids_array(random.integers(0, 150_000, 197))
        turns.append(
            Turn(
                id=f"t{k}",
                parent=turns[-1].id if turns else None,
                shared=shared,
                new_ids=new,
                output_ids=output,
                logprobs=-random.exponential(0.3, 197),
                finish_reason="stop",
                prompt_sha256=ids_sha256(prompt),
                prompt_length=len(prompt),
                versions=(("v1", 0, 197),),
                sampling={},
                logprobs_mode="processed",
                model="m",
                created=0.0,
                delivered=True,
            )
        )
        full = np.concatenate([prompt, output])
    return turns


def _ratio(turns: list[Turn]) -> tuple[float, int]:
    """CPU time of linearizing over that of one SHA-256 of the bytes of all rows: how far above the floor."""
    best = floor = float("inf")
    for _ in range(5):
        start = time.thread_time()
        samples = linearize(turns, episode_id="e", group_id="g", reward=1.0)
        best = min(best, time.thread_time() - start)
        start = time.thread_time()
        for sample in samples:
            ids_sha256(sample.tokens)
        floor = min(floor, time.thread_time() - start)
    return best / floor, len(samples)


def test_a_long_session_is_linearized_within_a_small_multiple_of_hashing_it() -> None:
    """About 6 ms for 174k tokens and 45 ms for 34 rows of 3.2 M on a slow core; quadratic work would be far off."""
    ratio, count = _ratio(big_session(0))
    assert count == 1
    assert ratio < 60
    ratio, count = _ratio(big_session(6))
    assert count == 34
    assert ratio < 30
