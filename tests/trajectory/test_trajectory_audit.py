"""The audit catches every way to corrupt a good session or its samples, each on its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sandlot.errors import AuditError
from sandlot.trajectory.audit import audit, audit_journal
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.sample import Sample, Span
from sandlot.trajectory.samples import linearize
from sandlot.trajectory.turn import Turn, ids_sha256
from support.profiles import few
from support.sessions import SessionBuilder, sessions


def good_session() -> list[Turn]:
    """Main conversation with an edit, a sub-agent, an answer that was never delivered, one cut by its length."""
    s = SessionBuilder()
    t0 = s.root((10, 11, 12), (20, 21), versions=(("v1", 0, 1), ("v2", 1, 2)))
    t1 = s.follow(t0, (30,), (22, 23, 24))
    s.root((90, 91), (92,), branch="subagent:a", fork="another system prompt")  # t2
    s.follow(t1, (31,), (25,), delivered=False)  # t3
    s.follow(t1, (31,), (26, 27), finish_reason="length")  # t4
    s.fork(t1, 4, (33, 34), (28,))  # t5
    return s.turns


class Case:
    """A good session that a corruption may change in place."""

    def __init__(self) -> None:
        self.turns = good_session()
        self.samples = linearize(self.turns, episode_id="e", group_id="g", reward=0.5)
        self.options: dict[str, Any] = {}

    def turn(self, k: int, **changes: Any) -> None:
        self.turns[k] = replace(self.turns[k], **changes)

    def sample(self, k: int, **changes: Any) -> None:
        self.samples[k] = replace(self.samples[k], **changes)

    def poke(self, k: int, name: str, at: int, value: Any) -> None:
        """One changed entry of a per-token array."""
        array = getattr(self.samples[k], name).copy()
        array[at] = value
        self.sample(k, **{name: array})

    def poke_turn(self, k: int, name: str, at: int, value: Any) -> None:
        array = getattr(self.turns[k], name).copy()
        array[at] = value
        self.turn(k, **{name: array})

    def span(self, k: int, n: int, **changes: Any) -> None:
        spans = list(self.samples[k].spans)
        spans[n] = spans[n]._replace(**changes)
        self.sample(k, spans=tuple(spans))


Corruption = Callable[[Case], Any]
CORRUPTIONS: dict[str, tuple[str, Corruption]] = {}


def corruption(kind: str) -> Callable[[Corruption], Corruption]:
    def register(function: Corruption) -> Corruption:
        CORRUPTIONS[function.__name__] = (kind, function)
        return function

    return register


def test_the_session_that_is_corrupted_is_good() -> None:
    case = Case()
    report = audit(case.turns, case.samples)
    report.raise_for_violations()
    assert report.ok
    assert (report.turns, report.samples, report.forks, report.undelivered) == (6, 3, 2, 1)
    assert (report.sampled, report.trained, report.kept) == (10, 9, 9)
    assert [s.branch for s in case.samples] == ["subagent:a", "main", "main"]
    assert [s.status for s in case.samples] == ["completed", "truncated", "completed"]


# --- samples ---------------------------------------------------------------------------------------------------------


@corruption("length")
def mask_shorter(c: Case) -> None:
    c.sample(1, loss_mask=c.samples[1].loss_mask[:-1])


@corruption("length")
def logprobs_longer(c: Case) -> None:
    c.sample(1, logprobs=np.append(c.samples[1].logprobs, np.float32(0)))


@corruption("length")
def versions_shorter(c: Case) -> None:
    c.sample(1, weight_versions=c.samples[1].weight_versions[1:])


@corruption("dtype")
def logprobs_in_double(c: Case) -> None:
    c.sample(1, logprobs=c.samples[1].logprobs.astype(np.float64))


@corruption("dtype")
def mask_of_floats(c: Case) -> None:
    c.sample(1, loss_mask=c.samples[1].loss_mask.astype(np.float32))


@corruption("prompt")
def prompt_token_changed(c: Case) -> None:
    c.poke(1, "tokens", 1, 99)


@corruption("prompt")
def token_between_turns_changed(c: Case) -> None:
    c.poke(1, "tokens", 5, 99)


@corruption("prompt")
def context_output_of_an_earlier_turn_changed(c: Case) -> None:
    c.poke(2, "tokens", 3, 99)


@corruption("prompt")
def token_inserted_in_the_prompt(c: Case) -> None:
    s = c.samples[0]
    c.sample(
        0,
        tokens=np.insert(s.tokens, 1, 5),
        loss_mask=np.insert(s.loss_mask, 0, 0),
        logprobs=np.insert(s.logprobs, 0, 0),
        weight_versions=("", *s.weight_versions),
        spans=tuple(x._replace(start=x.start + 1) for x in s.spans),
        prompt_length=s.prompt_length + 1,
    )


@corruption("prompt")
def left_truncated(c: Case) -> None:
    s = c.samples[1]
    c.sample(
        1,
        tokens=s.tokens[1:],
        loss_mask=s.loss_mask[1:],
        logprobs=s.logprobs[1:],
        weight_versions=s.weight_versions[1:],
        spans=tuple(x._replace(start=x.start - 1) for x in s.spans),
        prompt_length=s.prompt_length - 1,
    )


@corruption("tokens")
def sampled_token_changed(c: Case) -> None:
    c.poke(1, "tokens", 4, 99)


@corruption("tokens")
def last_token_changed(c: Case) -> None:
    c.poke(1, "tokens", -1, 99)


@corruption("logprobs")
def logprob_changed_in_the_last_bit(c: Case) -> None:
    c.poke(1, "logprobs", 3, np.nextafter(c.samples[1].logprobs[3], np.float32(-1)))


@corruption("logprobs")
def logprobs_shifted_by_one(c: Case) -> None:
    c.sample(1, logprobs=np.roll(c.samples[1].logprobs, 1))


@corruption("logprobs")
def logprob_defaulted_to_zero(c: Case) -> None:
    c.poke(1, "logprobs", 4, 0)


@corruption("logprobs")
def logprob_not_finite(c: Case) -> None:
    c.poke(1, "logprobs", 4, np.nan)


@corruption("logprobs")
def logprob_on_context(c: Case) -> None:
    c.poke(1, "logprobs", 0, -1)


@corruption("mask")
def prompt_token_trained(c: Case) -> None:
    c.poke(1, "loss_mask", 0, 1)


@corruption("mask")
def template_token_between_turns_trained(c: Case) -> None:
    c.poke(1, "loss_mask", 5, 1)


@corruption("mask")
def sampled_token_masked(c: Case) -> None:
    c.poke(1, "loss_mask", 4, 0)


@corruption("mask")
def shared_stretch_trained_again_without_a_span(c: Case) -> None:
    c.poke(2, "loss_mask", 3, 1)


@corruption("mask")
def mask_is_two(c: Case) -> None:
    c.poke(1, "loss_mask", 4, 2)


@corruption("mask")
def mask_shifted_by_one(c: Case) -> None:
    c.sample(1, loss_mask=np.roll(c.samples[1].loss_mask, -1))


@corruption("versions")
def weight_version_changed(c: Case) -> None:
    versions = list(c.samples[1].weight_versions)
    versions[3] = "v2"
    c.sample(1, weight_versions=tuple(versions))


@corruption("versions")
def weight_version_on_context(c: Case) -> None:
    c.sample(1, weight_versions=("v1", *c.samples[1].weight_versions[1:]))


@corruption("span_turn")
def span_of_a_turn_that_never_was(c: Case) -> None:
    c.span(1, 0, turn_id="t77")


@corruption("prompt")
def span_of_another_turn(c: Case) -> None:
    c.span(0, 0, turn_id="t5")


@corruption("span_part")
def span_starts_inside_the_output(c: Case) -> None:
    c.span(1, 0, start=4, offset=1, length=1)


@corruption("span_part")
def span_longer_than_the_output(c: Case) -> None:
    c.span(1, 0, length=3)


@corruption("span_range")
def span_leaves_the_sample(c: Case) -> None:
    c.span(1, 2, start=400)


@corruption("span_range")
def span_before_the_sample(c: Case) -> None:
    c.span(1, 0, start=-1)


@corruption("span_range")
def spans_out_of_order(c: Case) -> None:
    c.sample(1, spans=c.samples[1].spans[::-1])


@corruption("span_range")
def span_twice(c: Case) -> None:
    c.sample(1, spans=(c.samples[1].spans[0], *c.samples[1].spans))


@corruption("untrained")
def span_and_mask_of_a_turn_dropped(c: Case) -> None:
    s = c.samples[1]
    start, _, _, length = s.spans[0]
    mask, logprobs, versions = s.loss_mask.copy(), s.logprobs.copy(), list(s.weight_versions)
    mask[start : start + length] = 0
    logprobs[start : start + length] = 0
    versions[start : start + length] = [""] * length
    c.sample(1, loss_mask=mask, logprobs=logprobs, weight_versions=tuple(versions), spans=s.spans[1:])


@corruption("untrained")
def sample_dropped(c: Case) -> None:
    del c.samples[2]


@corruption("untrained")
def all_samples_dropped(c: Case) -> None:
    c.samples.clear()


@corruption("trained_twice")
def sample_twice(c: Case) -> None:
    c.samples.append(replace(c.samples[0], index=3))


@corruption("trained_twice")
def shared_stretch_trained_again(c: Case) -> None:
    turns = good_session()
    alone = linearize([t for t in turns if t.id in ("t0", "t1")], episode_id="e", group_id="g", reward=0.5)
    c.samples.append(replace(alone[0], index=3))


@corruption("not_kept")
def undelivered_turn_trained(c: Case) -> None:
    c.samples = linearize([replace(t, delivered=True) for t in c.turns], episode_id="e", group_id="g", reward=0.5)


@corruption("no_span")
def sample_without_training(c: Case) -> None:
    s = c.samples[0]
    c.sample(0, spans=(), loss_mask=np.zeros_like(s.loss_mask), logprobs=np.zeros_like(s.logprobs))


@corruption("no_span")
def empty_sample(c: Case) -> None:
    s = c.samples[0]
    empty = {"tokens": s.tokens[:0], "loss_mask": s.loss_mask[:0], "logprobs": s.logprobs[:0]}
    c.samples.append(replace(s, index=3, spans=(), weight_versions=(), prompt_length=0, **empty))


@corruption("tail")
def token_after_the_last_sampled_one(c: Case) -> None:
    s = c.samples[1]
    c.sample(
        1,
        tokens=np.append(s.tokens, np.int32(2)),
        loss_mask=np.append(s.loss_mask, np.uint8(0)),
        logprobs=np.append(s.logprobs, np.float32(0)),
        weight_versions=(*s.weight_versions, ""),
    )


@corruption("tail")
def padded(c: Case) -> None:
    s = c.samples[0]
    c.sample(
        0,
        tokens=np.append(s.tokens, np.zeros(5, np.int32)),
        loss_mask=np.append(s.loss_mask, np.zeros(5, np.uint8)),
        logprobs=np.append(s.logprobs, np.zeros(5, np.float32)),
        weight_versions=(*s.weight_versions, *[""] * 5),
    )


@corruption("leaf")
def path_split_in_two_rows(c: Case) -> None:
    turns = good_session()
    upper = linearize(turns[:2], episode_id="e", group_id="g", reward=0.5)[0]
    s = c.samples[1]
    mask, logprobs, versions = s.loss_mask.copy(), s.logprobs.copy(), list(s.weight_versions)
    for start, _, _, length in s.spans[:2]:
        mask[start : start + length] = 0
        logprobs[start : start + length] = 0
        versions[start : start + length] = [""] * length
    c.sample(1, loss_mask=mask, logprobs=logprobs, weight_versions=tuple(versions), spans=s.spans[2:])
    c.samples.append(replace(upper, index=3))


@corruption("prompt_length")
def prompt_length_changed(c: Case) -> None:
    c.sample(1, prompt_length=4)


@corruption("prompt_length")
def prompt_length_of_the_own_stretch(c: Case) -> None:
    c.samples[:] = [replace(s, prompt_length=s.spans[-1].start) for s in c.samples]


@corruption("branch")
def branch_changed(c: Case) -> None:
    c.sample(0, branch="main")


@corruption("status")
def truncation_hidden(c: Case) -> None:
    c.sample(1, status="completed")


@corruption("status")
def truncation_invented(c: Case) -> None:
    c.sample(0, status="truncated")


@corruption("status")
def unknown_status(c: Case) -> None:
    c.sample(0, status="aborted")


@corruption("index")
def index_repeated(c: Case) -> None:
    c.sample(1, index=0)


@corruption("index")
def rows_in_another_order(c: Case) -> None:
    c.samples.reverse()


@corruption("identity")
def row_of_another_episode(c: Case) -> None:
    c.sample(1, episode_id="other")


@corruption("identity")
def row_of_another_group(c: Case) -> None:
    c.sample(1, group_id="other")


@corruption("reward")
def reward_differs_between_siblings(c: Case) -> None:
    c.sample(1, reward=0.25)


@corruption("reward")
def one_sibling_ungraded(c: Case) -> None:
    c.sample(1, reward=None)


@corruption("reward")
def reward_above_one(c: Case) -> None:
    c.samples[:] = [replace(s, reward=1.5) for s in c.samples]


@corruption("reward")
def reward_negative(c: Case) -> None:
    c.samples[:] = [replace(s, reward=-0.1) for s in c.samples]


@corruption("reward")
def reward_not_a_number(c: Case) -> None:
    c.samples[:] = [replace(s, reward=float("nan")) for s in c.samples]


@corruption("advantage")
def advantage_infinite(c: Case) -> None:
    c.sample(0, advantage=float("inf"))


@corruption("loss_weight")
def loss_weight_negative(c: Case) -> None:
    c.sample(0, loss_weight=-1.0)


@corruption("loss_weight")
def loss_weight_not_a_number(c: Case) -> None:
    c.sample(0, loss_weight=float("nan"))


# --- the session -----------------------------------------------------------------------------------------------------


@corruption("session")
def session_not_sealed(c: Case) -> None:
    c.options["sealed"] = False


@corruption("session")
def session_aborted(c: Case) -> None:
    c.options["failure"] = "aborted"


@corruption("session")
def session_broken_by_infrastructure(c: Case) -> None:
    c.options["failure"] = "infra_error"


@corruption("session")
def session_without_turns(c: Case) -> None:
    c.turns.clear()


@corruption("overlong")
def longer_than_allowed(c: Case) -> None:
    c.options["max_tokens"] = 9


@corruption("turn_duplicate")
def turn_twice(c: Case) -> None:
    c.turns.append(c.turns[2])


@corruption("span_turn")
def turn_lost(c: Case) -> None:
    del c.turns[2]


@corruption("turn_parent")
def parent_lost(c: Case) -> None:
    del c.turns[0]


@corruption("turn_parent")
def turns_in_another_order(c: Case) -> None:
    c.turns.reverse()


@corruption("turn_parent")
def parent_unknown(c: Case) -> None:
    c.turn(4, parent="t77")


@corruption("turn_shared")
def shares_more_than_there_is(c: Case) -> None:
    t = c.turns[1]
    c.turn(1, shared=t.shared + 1, prompt_length=t.prompt_length + 1)


@corruption("turn_shared")
def root_shares(c: Case) -> None:
    c.turn(0, shared=1, prompt_length=4)


@corruption("turn_shared")
def shares_less_than_nothing(c: Case) -> None:
    c.turn(1, shared=-1, prompt_length=0)


@corruption("turn_prompt")
def parent_is_another_turn(c: Case) -> None:
    c.turn(5, parent="t0", shared=3, prompt_length=5)


@corruption("turn_prompt_length")
def prompt_length_of_a_turn_changed(c: Case) -> None:
    c.turn(1, prompt_length=7)


@corruption("turn_prompt")
def prompt_hash_changed(c: Case) -> None:
    c.turn(1, prompt_sha256=ids_sha256(np.array([1])))


@corruption("turn_prompt")
def prompt_delta_changed(c: Case) -> None:
    c.poke_turn(1, "new_ids", 0, 99)


@corruption("turn_prompt")
def output_of_a_continued_turn_changed(c: Case) -> None:
    c.poke_turn(0, "output_ids", 0, 99)


@corruption("tokens")
def output_of_a_leaf_changed(c: Case) -> None:
    c.poke_turn(4, "output_ids", 0, 99)


@corruption("logprobs")
def logprob_of_a_turn_changed(c: Case) -> None:
    c.poke_turn(4, "logprobs", 0, -2.0)


@corruption("turn_logprobs")
def logprob_of_a_turn_lost(c: Case) -> None:
    c.turn(4, logprobs=c.turns[4].logprobs[:-1])


@corruption("turn_logprobs")
def logprob_of_a_turn_added(c: Case) -> None:
    c.turn(4, logprobs=np.append(c.turns[4].logprobs, -1.0))


@corruption("turn_logprobs")
def logprob_of_a_turn_nan(c: Case) -> None:
    c.poke_turn(4, "logprobs", 0, np.nan)


@corruption("turn_logprobs")
def logprob_of_a_turn_infinite(c: Case) -> None:
    c.poke_turn(4, "logprobs", 0, -np.inf)


@corruption("turn_logprobs")
def logprob_of_a_turn_positive(c: Case) -> None:
    c.poke_turn(4, "logprobs", 0, 0.5)


@corruption("turn_logprobs")
def logprob_of_a_turn_missing(c: Case) -> None:
    c.poke_turn(4, "logprobs", 0, -9999.0)


@corruption("turn_finish")
def turn_aborted(c: Case) -> None:
    c.turn(4, finish_reason="abort")


@corruption("turn_finish")
def turn_without_finish_reason(c: Case) -> None:
    c.turn(4, finish_reason="")


@corruption("turn_empty")
def turn_without_output(c: Case) -> None:
    c.turn(4, output_ids=c.turns[4].output_ids[:0], logprobs=c.turns[4].logprobs[:0], versions=())


@corruption("turn_token")
def negative_token(c: Case) -> None:
    c.poke_turn(4, "output_ids", 0, -1)


@corruption("turn_versions")
def versions_of_a_turn_with_a_gap(c: Case) -> None:
    c.turn(0, versions=(("v1", 0, 1),))


@corruption("turn_versions")
def versions_of_a_turn_overlap(c: Case) -> None:
    c.turn(0, versions=(("v1", 0, 2), ("v2", 1, 2)))


@corruption("turn_versions")
def version_of_a_turn_without_name(c: Case) -> None:
    c.turn(0, versions=(("", 0, 2),))


@corruption("versions")
def versions_of_a_turn_changed(c: Case) -> None:
    c.turn(0, versions=(("v9", 0, 2),))


@corruption("turn_mode")
def raw_logprobs_at_another_temperature(c: Case) -> None:
    c.turn(4, logprobs_mode="raw", sampling={"temperature": 0.7})


@corruption("turn_mode")
def raw_logprobs_of_a_truncated_distribution(c: Case) -> None:
    c.turn(4, logprobs_mode="raw", sampling={"temperature": 1.0, "top_p": 0.9})


@corruption("turn_mode")
def logprobs_of_who_knows_what(c: Case) -> None:
    c.turn(4, logprobs_mode="logits")


@corruption("stretch")
def shared_stretch_trained_by_the_later_leaf(c: Case) -> None:
    s = SessionBuilder()
    t0 = s.root((10, 11), (20,))
    first, second = s.follow(t0, (30,), (21,)), s.follow(t0, (31,), (22,))
    rows = linearize([t0, second, first], episode_id="e", group_id="g", reward=0.5)
    c.turns, c.samples = s.turns, [replace(rows[1], index=0), replace(rows[0], index=1)]


@corruption("order")
def leaves_in_another_order(c: Case) -> None:
    c.samples[:] = [replace(c.samples[k], index=n) for n, k in enumerate((1, 0, 2))]


@corruption("metadata")
def fact_of_the_session_changed(c: Case) -> None:
    c.options["metadata"] = {"task": "x"}


@corruption("metadata")
def retry_hidden(c: Case) -> None:
    c.options["metadata"] = {}
    c.sample(2, metadata={**c.samples[2].metadata, "abandoned": True})


@corruption("metadata")
def number_of_turns_changed(c: Case) -> None:
    c.options["metadata"] = {}
    c.sample(1, metadata={**c.samples[1].metadata, "turns": 1})


@corruption("untrained")
def delivery_noted_too_late(c: Case) -> None:
    c.turn(3, delivered=True)


@corruption("not_kept")
def delivery_lost(c: Case) -> None:
    c.turn(4, delivered=False)


@corruption("status")
def finish_reason_of_a_turn_changed(c: Case) -> None:
    c.turn(4, finish_reason="stop")


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_caught(name: str) -> None:
    kind, corrupt = CORRUPTIONS[name]
    case = Case()
    corrupt(case)
    report = audit(case.turns, case.samples, **case.options)
    assert kind in {v.kind for v in report.violations}, [str(v) for v in report.violations]
    with pytest.raises(AuditError, match=r"refused, \d+ violations: "):
        report.raise_for_violations()


def test_there_are_many_kinds_of_corruption() -> None:
    assert len(CORRUPTIONS) >= 80
    assert len({kind for kind, _ in CORRUPTIONS.values()}) >= 25


def test_a_violation_says_where() -> None:
    case = Case()
    case.poke(1, "tokens", 4, 99)
    violation = next(v for v in audit(case.turns, case.samples).violations if v.kind == "tokens")
    assert (violation.sample, violation.turn, violation.position) == (1, "t0", 4)
    assert str(violation) == "tokens (sample 1, turn t0, token 4): the token is not the one that was sampled there"


FIELDS = ("tokens", "loss_mask", "logprobs")


@few
@given(session=sessions(min_turns=1), data=st.data())
def test_any_single_changed_entry_of_any_sample_is_caught(session: SessionBuilder, data: st.DataObject) -> None:
    samples = linearize(session.turns, episode_id="e", group_id="g", reward=1.0)
    assume(samples)
    k = data.draw(st.integers(0, len(samples) - 1))
    name = data.draw(st.sampled_from((*FIELDS, "weight_versions")))
    at = data.draw(st.integers(0, len(samples[k].tokens) - 1))
    if name == "weight_versions":
        changed = list(samples[k].weight_versions)
        changed[at] += "x"
        samples[k] = replace(samples[k], weight_versions=tuple(changed))
    else:
        array = getattr(samples[k], name).copy()
        array[at] = array[at] - 1 if array[at] else array[at] + 1
        samples[k] = replace(samples[k], **{name: array})
    assert not audit(session.turns, samples).ok


@few
@given(session=sessions(min_turns=1), data=st.data())
def test_any_changed_token_of_any_turn_is_caught(session: SessionBuilder, data: st.DataObject) -> None:
    samples = linearize(session.turns, episode_id="e", group_id="g", reward=1.0)
    trained = {span.turn_id for sample in samples for span in sample.spans}
    places = [
        (k, name, at)
        for k, turn in enumerate(session.turns)
        if turn.id in trained
        for name in ("new_ids", "output_ids")
        for at in range(len(getattr(turn, name)))
    ]
    assume(places)
    k, name, at = data.draw(st.sampled_from(places))
    turn = session.turns[k]
    array = getattr(turn, name).copy()
    array[at] ^= 1
    turns = [*session.turns[:k], replace(turn, **{name: array}), *session.turns[k + 1 :]]
    assert not audit(turns, samples).ok


def _content(**sealed: Any) -> JournalContent:
    header = SessionRecord(episode_id="e", group_id="g")
    return JournalContent(header, good_session(), frozenset(), [], SealedRecord(**sealed) if sealed else None, False)


def _samples(**changes: Any) -> list[Sample]:
    return [replace(s, **changes) for s in linearize(good_session(), episode_id="e", group_id="g", reward=0.5)]


@pytest.mark.parametrize("mode", ["processed", "raw", "unknown"])
def test_every_mode_that_a_probe_finds_can_be_trained(mode: str) -> None:
    """`unknown` is that of an engine which scores nothing, or was sure of all its tokens."""
    case = Case()
    for index in range(len(case.turns)):
        case.turn(index, logprobs_mode=mode)
    assert audit(case.turns, case.samples).ok


def test_a_journal_proves_its_own_samples_only() -> None:
    audit_journal(_content(reward=0.5), _samples()).raise_for_violations()
    for content, samples, kind in (
        (_content(reward=1.0), _samples(), "reward"),
        (_content(reward=0.5), _samples(reward=None), "reward"),
        (_content(reward=0.5), _samples(episode_id="f"), "identity"),
        (_content(reward=0.5), _samples(group_id="f"), "identity"),
        (_content(reward=0.5), _samples(advantage=0.0), "credit"),
        (_content(reward=0.5), _samples(loss_weight=0.5), "credit"),
        (_content(reward=0.5), _samples(metadata={}), "metadata"),
        (_content(), _samples(), "session"),
        (_content(reward=None, failure="aborted"), _samples(reward=None), "session"),
    ):
        assert kind in {v.kind for v in audit_journal(content, samples).violations}


def test_a_turn_of_another_distribution_than_its_session_tells() -> None:
    content = _content(reward=0.5)
    header = SessionRecord(episode_id="e", group_id="g", sampling={"temperature": 1.0, "max_tokens": 9})
    audit_journal(replace(content, header=header), _samples()).raise_for_violations()
    header = SessionRecord(episode_id="e", group_id="g", sampling={"temperature": 0.5})
    found = audit_journal(replace(content, header=header), _samples()).violations
    assert {v.kind for v in found} == {"turn_sampling"}
    assert str(found[0]) == "turn_sampling (turn t0): temperature is 1.0, not 0.5"


def test_of_two_equal_answers_the_later_one_was_continued() -> None:
    """The first was lost on its way, the retry gave the same tokens: only the retry is trained."""
    s = SessionBuilder()
    s.root((1, 2), (3,), delivered=False)
    s.root((1, 2), (3,), delivered=False)
    s.add((1, 2, 3, 4), (5,))
    samples = linearize(s.turns, episode_id="e", group_id="g", reward=1.0)
    assert [[span.turn_id for span in sample.spans] for sample in samples] == [["t1", "t2"]]
    report = audit(s.turns, samples)
    report.raise_for_violations()
    assert report.undelivered == 1
    swapped = [replace(samples[0], spans=(Span(2, "t0", 0, 1), samples[0].spans[1]))]
    assert {v.kind for v in audit(s.turns, swapped).violations} == {"path", "untrained", "not_kept"}


def test_sessions_that_give_no_samples_are_in_order_without_any() -> None:
    assert audit([], []).ok
    assert audit(good_session(), [], sealed=False).ok
    assert audit(good_session(), [], failure="infra_error").ok
    assert not audit(good_session(), [], failure="agent_timeout").ok
    assert not audit(good_session(), [], failure="grader_error").ok


def test_span_positions_survive_as_plain_numbers() -> None:
    span = Case().samples[1].spans[0]
    assert span == Span(3, "t0", 0, 2)
