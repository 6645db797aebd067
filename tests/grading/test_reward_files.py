"""Reading a verifier's reward file, and what speaks against it: without a sandbox."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.errors import GradingError
from sandlot.grading.credit import weighted
from sandlot.grading.harbor import contradicted, forged, read_rewards
from sandlot.grading.swepro import read_results
from sandlot.grading.witness import Report
from sandlot.tasks import GradingOptions
from support.profiles import few


@pytest.mark.parametrize(
    ("name", "data", "rewards"),
    [
        ("reward.txt", b"1\n", {"reward": 1.0}),
        ("reward.txt", b" 0.25 ", {"reward": 0.25}),
        ("reward.json", b'{"a": 1, "b": 0.5}', {"a": 1.0, "b": 0.5}),
    ],
)
def test_rewards(name: str, data: bytes, rewards: dict[str, float]) -> None:
    assert read_rewards(name, data) == rewards


@pytest.mark.parametrize("data", [b"", b"nan", b"inf", b"1.5", b"-0.5", b"1\n0", b"\xff", b"true"])
def test_what_is_no_reward(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_rewards("reward.txt", data)


@pytest.mark.parametrize(
    "data",
    [
        *(b"1", b"[]", b"{}", b'{"a": true}', b'{"a": "1"}', b'{"a": NaN}', b'{"a": 1e999}', b'{"a": -1}', b"{"),
        b'{"a": 1%s}' % (b"0" * 400),
    ],
)
def test_what_is_no_object_of_rewards(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_rewards("reward.json", data)


NUMBERS = st.floats() | st.integers() | st.booleans() | st.none() | st.text(max_size=5)


@few
@given(
    st.binary(max_size=60)
    | NUMBERS.map(lambda value: str(value).encode())
    | st.dictionaries(st.text(max_size=5), NUMBERS).map(lambda value: json.dumps(value).encode())
    | st.integers(1, 100_000).map(lambda depth: b"[" * depth)
)
def test_a_reward_file_holds_numbers_from_0_to_1_or_is_none(data: bytes) -> None:
    for name in ("reward.json", "reward.txt"):
        try:
            rewards = read_rewards(name, data)
        except ValueError:
            continue
        assert rewards
        assert all(0 <= number <= 1 for number in rewards.values())


KEYS = st.sampled_from(["tests", "name", "status", "x"])
ANY_JSON = st.recursive(
    NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@few
@given(
    st.binary(max_size=60)
    | ANY_JSON.map(lambda value: json.dumps({"tests": value}).encode())
    | ANY_JSON.map(lambda value: json.dumps(value).encode())
    | st.integers(1, 100_000).map(lambda depth: b"[" * depth)
)
def test_what_a_parser_writes_is_results_or_refused(data: bytes) -> None:
    try:
        found = read_results(data)
    except ValueError:
        return
    assert set(found.values()) <= {"passed", "failed", "error", "skipped"}
    for test in json.loads(data)["tests"]:
        if str(test["status"]).upper() != "PASSED":
            assert found[str(test["name"])] != "passed"


def test_one_number_of_several() -> None:
    assert weighted(GradingOptions(), {"reward": 0.5, "b": 1.0}) == 0.5
    assert weighted(GradingOptions(), {"b": 0.75}) == 0.75
    assert weighted(GradingOptions(weights={"a": 1, "b": 3}), {"a": 0.0, "b": 1.0}) == 0.75
    with pytest.raises(GradingError, match="say their weights"):
        weighted(GradingOptions(), {"a": 1.0, "b": 1.0})
    with pytest.raises(GradingError, match="'c', which has a weight"):
        weighted(GradingOptions(weights={"c": 1}), {"a": 1.0})


def test_a_file_that_the_verifier_does_not_write() -> None:
    files = {"test.sh": b"echo 1 > /logs/verifier/reward.txt"}
    assert forged("reward.txt", files) == ""
    assert "something wrote reward.json" in forged("reward.json", files)
    assert forged("reward.json", {"test.sh": b"python3 /tests/judge.py"}) == ""


SESSION = {"sessions": {"s": 0}, "collected": {"s": {"t"}}, "reported": {"s": {"t"}}, "tests": {"t": "passed"}}
TWO = {"tests": {"t": "passed", "u": "failed"}, "collected": {"s": {"t", "u"}}, "reported": {"s": {"t", "u"}}}


@pytest.mark.parametrize(
    ("change", "reward", "reason"),
    [
        ({}, 1.0, ""),
        ({"sessions": {}}, 1.0, ""),
        ({"sessions": {"s": None}}, 0.5, "did not finish"),
        ({"reported": {}}, 0.5, "did not report t, which it collected"),
        ({"reported": {"s": {"t", "u"}}}, 0.5, "reported u, which it did not collect"),
        ({"tests": {"t": "failed"}}, 0.5, "none of its tests passed"),
        (TWO, 0.5, ""),
        (TWO, 1.0, "u did not pass"),
        ({"errors": {"v.py": "x"}}, 1.0, "v.py did not pass"),
        ({"stray": "x"}, 1.0, "result channel"),
        ({"broken": ["f"]}, 1.0, "was changed"),
        ({"foreign_skips": ["t"]}, 1.0, "was skipped"),
    ],
)
def test_a_reward_that_the_sessions_contradict(change: dict[str, object], reward: float, reason: str) -> None:
    found = contradicted(Report(**{**SESSION, **change}), reward)  # type: ignore[arg-type]
    assert (reason in found) if reason else (found == "")
