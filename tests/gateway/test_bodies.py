"""Bodies that go on from earlier ones are decoded to what a plain decoder makes of them, and mean the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.gateway.bodies import Bodies
from sandlot.gateway.wire import wire_for
from sandlot.gateway.wire.transcript import History, Item

_texts = st.text(max_size=6) | st.sampled_from(['"messages"', '"messages":[', "]", '{"messages":[{}]}', "\\"])
_blocks = st.fixed_dictionaries(
    {"type": st.just("text"), "text": _texts},
    optional={"cache_control": st.just({"type": "ephemeral"})},
)
_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.lists(_blocks, min_size=1, max_size=2) | _texts}
)
_rest = st.dictionaries(st.sampled_from(["model", "metadata", "system", "tools", "x"]), _texts | st.just([{"a": 1}]))


@st.composite
def _sessions(draw: st.DrawFn) -> list[bytes]:
    """Bodies of one session: it goes on, is rewritten, falls back, with fields in any order and spacing."""
    history: list[Any] = []
    bodies = []
    for _ in range(draw(st.integers(1, 8))):
        match draw(st.sampled_from(["on", "on", "on", "cut", "edit"])):
            case "cut":
                history = history[: draw(st.integers(0, len(history)))]
            case "edit" if history:
                history[draw(st.integers(0, len(history) - 1))] = draw(_messages)
        history = [*history, *draw(st.lists(_messages, max_size=3))]
        before, after = draw(_rest), draw(_rest)
        body = {**before, "messages": history, **{k: v for k, v in after.items() if k not in before}}
        bodies.append(json.dumps(body, indent=draw(st.sampled_from([None, None, 1]))).encode())
    return bodies


@given(_sessions())
def test_a_body_is_what_a_plain_decoder_makes_of_it(bodies: list[bytes]) -> None:
    reader = Bodies()
    for raw in bodies:
        assert reader.decode(raw, "w") == msgspec.json.decode(raw)


@given(_sessions())
def test_a_body_means_what_it_means_alone(bodies: list[bytes]) -> None:
    reader, wire = Bodies(), wire_for("/v1/messages")
    for raw in bodies:
        plain = msgspec.json.decode(raw)
        if plain["messages"] and not isinstance(plain.get("tools"), str):
            known, alone = wire.parse(reader.decode(raw, "w"), {}), wire.parse(plain, {})
            assert known == alone
            assert [m.marks for m in known.messages] == [m.marks for m in alone.messages]


def test_what_came_before_is_not_decoded_again() -> None:
    reader = Bodies()
    messages = [{"role": "user", "content": str(k)} for k in range(6)]
    first = reader.decode(json.dumps({"messages": messages[:4], "x": 1}).encode(), "w")["messages"]
    second = reader.decode(json.dumps({"messages": messages, "x": 2}).encode(), "w")["messages"]
    assert isinstance(second, History)
    assert second.shared == 3
    assert all(a is b and isinstance(a, Item) for a, b in zip(first, second, strict=False))


@pytest.mark.parametrize(
    "broken",
    ['{"messages": [{"a": 1}, {"b": 2},]}', '{"messages": [{"a": 1}, {"b": 2}', '{"messages": [{"a": 1} {"c": 3}]}'],
)
def test_a_broken_body_is_refused_also_where_it_began_well(broken: str) -> None:
    reader = Bodies()
    reader.decode(b'{"messages": [{"a": 1}, {"b": 2}]}', "w")
    with pytest.raises(msgspec.DecodeError):
        reader.decode(broken.encode(), "w")


def test_a_field_that_comes_twice_counts_as_the_last_one() -> None:
    reader = Bodies()
    reader.decode(b'{"messages": [{"a": 1}, {"b": 2}, {"c": 3}]}', "w")
    twice = b'{"messages": [{"a": 1}, {"b": 2}, {"c": 3}], "messages": [{"d": 4}, {"e": 5}]}'
    assert reader.decode(twice, "w") == msgspec.json.decode(twice)
    assert reader.decode(twice, "w") == msgspec.json.decode(twice)
