"""Bodies that go on from earlier ones are decoded to what a plain decoder makes of them, and mean the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.gateway import bodies
from sandlot.gateway.bodies import Bodies
from sandlot.gateway.wire import WireError, wire_for
from sandlot.gateway.wire.transcript import History, Item
from support.profiles import few

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


@few
@given(_sessions())
def test_a_body_is_what_a_plain_decoder_makes_of_it(bodies: list[bytes]) -> None:
    reader = Bodies()
    for raw in bodies:
        assert reader.decode(raw, "w") == msgspec.json.decode(raw)


@few
@given(_sessions())
def test_a_body_means_what_it_means_alone(bodies: list[bytes]) -> None:
    reader, wire = Bodies(), wire_for("/v1/messages")
    for raw in bodies:
        plain = msgspec.json.decode(raw)
        if plain["messages"] and not isinstance(plain.get("tools"), str):
            known, alone = wire.parse(reader.decode(raw, "w"), {}), wire.parse(plain, {})
            assert known == alone
            assert [m.marks for m in known.messages] == [m.marks for m in alone.messages]


_ITEMS: dict[str, Any] = {
    "user": {"role": "user", "content": "go"},
    "thought": {"type": "reasoning", "summary": [], "encrypted_content": "E1"},
    "text": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    "bare": {"role": "assistant", "content": ""},
    "call": {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    "call2": {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "[1]"},
    "result": {"type": "function_call_output", "call_id": "c1", "output": "r"},
    "result2": {"type": "function_call_output", "call_id": "c2", "output": "r"},
    "search": {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {}},
    "found": {"type": "tool_search_output", "call_id": "s", "tools": [{"type": "function", "name": "g"}]},
    "more": {"type": "additional_tools", "tools": [{"type": "function", "name": "h"}]},
    "settings": {"type": "configuration_update"},
    "unnamed": {"type": "function_call_output", "output": "r"},
    "odd": {"type": "brand_new"},
}


@given(st.lists(st.sampled_from(sorted(_ITEMS)), min_size=1, max_size=14), st.data())
def test_items_mean_what_they_mean_alone(names: list[str], data: st.DataObject) -> None:
    """However a history of items grows and falls back, whatever is open where it is gone on from."""
    reader, wire = Bodies(), wire_for("/v1/responses")
    for _ in range(data.draw(st.integers(1, 6))):
        items = [_ITEMS[name] for name in names[: data.draw(st.integers(1, len(names)))]]
        raw = json.dumps({"instructions": "be", "input": items}).encode()
        try:
            alone = wire.parse(msgspec.json.decode(raw), {})
        except WireError as error:
            with pytest.raises(WireError, match=re.escape(str(error))):
                wire.parse(reader.decode(raw, "w"), {})
            continue
        known = wire.parse(reader.decode(raw, "w"), {})
        assert known == alone
        assert [m.marks for m in known.messages] == [m.marks for m in alone.messages]


def _responses_turn(ids: list[str]) -> list[Any]:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": ids[0]}
    calls = [{"type": "function_call", "call_id": c, "name": "f", "arguments": "{}"} for c in ids]
    return [thought, *calls, *({"type": "function_call_output", "call_id": c, "output": "r"} for c in ids)]


def _chat_turn(ids: list[str]) -> list[Any]:
    calls = [{"id": c, "function": {"name": "f"}} for c in ids]
    return [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", "tool_call_id": c} for c in ids)]


def _anthropic_turn(ids: list[str]) -> list[Any]:
    calls = [{"type": "tool_use", "id": c, "name": "f"} for c in ids]
    results = [{"type": "tool_result", "tool_use_id": c} for c in ids]
    return [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]


def _google_turn(ids: list[str]) -> list[Any]:
    calls, results = ([{kind: {"id": c, "name": "f"}} for c in ids] for kind in ("functionCall", "functionResponse"))
    return [{"role": "model", "parts": calls}, {"role": "user", "parts": results}]


@pytest.mark.parametrize(
    ("path", "field", "turn"),
    [
        ("/v1/responses", "input", _responses_turn),
        ("/v1/chat/completions", "messages", _chat_turn),
        ("/v1/messages", "messages", _anthropic_turn),
        ("/v1beta/models/m:generateContent", "contents", _google_turn),
    ],
)
def test_what_came_before_is_not_read_again(path: str, field: str, turn: Callable[[list[str]], list[Any]]) -> None:
    """The next request is read from the last turn on; the messages before it are the very same."""
    wire, reader = wire_for(path), Bodies()
    history: list[Any] = [{"role": "user", "content": "go", "parts": [{"text": "go"}]}]
    before: tuple[Any, ...] = ()
    for number in range(3):
        known, history = len(history), [*history, *turn([f"c{number}{k}" for k in range(6)])]
        body = reader.decode(json.dumps({field: history}).encode(), wire.name)
        asked = wire.parse(body, {})
        assert all(old is new for old, new in zip(before, asked.messages, strict=False))
        assert body[field].state.count > known
        before = asked.messages


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


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"a\ud83d b", "a\ufffd b"),
        (rb"\uDE00\ud83d\ude00\uD83D", "\ufffd\U0001f600\ufffd"),
        (rb"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
        (b"a\xff\xed\xa0\xbd", "a\ufffd\ufffd\ufffd\ufffd"),
    ],
)
def test_half_a_character_does_not_end_the_session(written: bytes, read: str) -> None:
    """Clients cut tool outputs between the two halves of a character, and send that again with every request."""
    reader, history = Bodies(), b'{"messages": [{"a": "%b"}, {"b": "c"}' % written
    for more in (b"", b', {"d": "e"}', b', {"d": "e"}, {"f": "%b"}' % written):
        messages = reader.decode(history + more + b"]}", "w")["messages"]
        assert messages[0] == {"a": read}
    assert messages[3] == {"f": read}


def test_a_field_that_comes_twice_counts_as_the_last_one() -> None:
    reader = Bodies()
    reader.decode(b'{"messages": [{"a": 1}, {"b": 2}, {"c": 3}]}', "w")
    twice = b'{"messages": [{"a": 1}, {"b": 2}, {"c": 3}], "messages": [{"d": 4}, {"e": 5}]}'
    assert reader.decode(twice, "w") == msgspec.json.decode(twice)
    assert reader.decode(twice, "w") == msgspec.json.decode(twice)


def test_what_is_kept_of_a_session_has_a_bound() -> None:
    """A great many small elements, fields of any name, tools nobody sends again."""
    reader, rng = Bodies(), iter(range(10**9))
    for field in ("messages", "tools", "input"):
        elements = ",".join(f'{{"a":{next(rng)}}}' for _ in range(70_000))
        assert len(reader.decode(f'{{"{field}": [{elements}]}}'.encode(), "w")[field]) == 70_000
    assert reader._begun["w"] == []
    fields = ",".join(f'"k{next(rng)}":[{{}}]' for _ in range(1000))
    reader.decode(f'{{"messages": [], {fields}}}'.encode(), "w")
    large = json.dumps({"messages": [], "tools": [{"name": "t", "description": "x" * bodies._LAST_TOOLS}]}).encode()
    assert reader.decode(large, "w") == json.loads(large)
    assert sum(len(raw) for raw, _ in reader._tools.values()) < bodies._LAST_TOOLS
    for items in (reader._items, bodies._shared):
        assert len(items._known) < 20
        assert sum(map(len, items._known.values())) < 70_000
