"""Bodies of a great many values: refused before they are decoded, where no real history comes near."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.chat.messages import Message, ToolCall
from sandlot.chat.roles import short_id
from sandlot.gateway import bodies
from sandlot.gateway.bodies import Bodies
from sandlot.gateway.wire import WireError, transcript, values, wire_for
from sandlot.gateway.wire.canon import arguments_of
from support.captures import captured, load_capture
from support.profiles import few
from support.rig import MakeRig, ask

MANY = values.MOST + 1_000
HI: dict[str, Any] = {"role": "user", "content": "hi", "parts": [{"text": "hi"}]}
ROOMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/messages": lambda held: {"messages": [HI], "tools": [{"name": "t", "input_schema": {"x": held}}]},
    "/v1/messages/count_tokens": lambda held: {"messages": [HI] * MANY, "x": held},
    "/v1/chat/completions": lambda held: {"messages": [{**HI, "x": held}]},
    "/v1/responses": lambda held: {"input": [HI], "previous_response_id": "resp_x", "metadata": held},
    "/v1/responses/input_tokens": lambda held: {"input": [{"type": "reasoning", "summary": held}]},
    "/v1beta/models/m:generateContent": lambda held: {
        "contents": [{"role": "model", "parts": [{"functionCall": {"name": "t", "args": {"x": held}}}]}]
    },
}
HELD: dict[str, Any] = {
    "numbers": [0] * MANY,
    "lists": [[]] * MANY,
    "keys": {str(k): "" for k in range(MANY)},
    "digits": [int("9" * 4_000)] * 1_000,
}


@pytest.mark.parametrize("path", ROOMS)
@pytest.mark.parametrize("held", HELD)
async def test_what_no_history_has_is_refused_for_good(make_rig: MakeRig, path: str, held: str) -> None:
    rig = await make_rig()
    raw = json.dumps(ROOMS[path](HELD[held])).encode()
    async with rig.http.post(f"{rig.url}{path}", data=raw, headers={"x-api-key": rig.opened.api_key}) as reply:
        told = await reply.json()
        assert (reply.status, reply.headers["x-should-retry"]) == (413, "false")
    assert "send less structure and more text" in told["error"]["message"]
    assert not any(rig.session.bodies._begun.values())
    assert (await rig.messages(ask("go on")))[0] == 200
    assert len(rig.engine.prompts) == 1


async def test_more_messages_than_a_context_holds_are_refused(make_rig: MakeRig) -> None:
    rig = await make_rig()
    body = ask("go")
    body["messages"] *= values.MOST_MESSAGES
    status, told = await rig.messages(body)
    assert (status, told["error"]["type"]) == (413, "request_too_large")
    assert f"{values.MOST_MESSAGES + 1} messages and tools" in told["error"]["message"]


def test_many_values_are_refused_however_they_come() -> None:
    """Body by body, each going on from the one before; broken off in the end, or with half a character."""
    reader, text = Bodies(), json.dumps({"role": "user", "content": [[]] * 40_000})

    def grow() -> None:
        for number in range(1, 200):
            history = ",".join([text] * number)
            reader.decode(f'{{"messages": [{history}, {{}}]}}'.encode(), "w")
            assert sum(one.weight for one in reader._begun["w"]) <= bodies._WHOLE

    with pytest.raises(WireError, match=r"more than \d+ JSON values"):
        grow()
    for end in ("]}", "", ', "\\ud800"]}'):
        with pytest.raises(WireError, match=r"more than \d+ JSON values"):
            Bodies().decode(f'{{"messages": [{",".join([text] * 10)}{end}'.encode(), "w")


def test_arguments_of_many_values_are_refused() -> None:
    """They are JSON within JSON, and may be written as escapes."""
    most = values.MOST_TOGETHER
    assert arguments_of(json.dumps({"x": [0] * (most - 2)})) == {"x": [0] * (most - 2)}
    code = {"x": "f(a, [b], {c});" * most}
    assert arguments_of(json.dumps(code)) == code
    for text in (json.dumps({"x": [[]] * most}), '{"x":[' + "9" * 20 * most):
        with pytest.raises(WireError, match=r"one message, tool or call holds more than \d+ JSON values"):
            arguments_of(text)
    calls = [{"type": "function_call", "call_id": str(k), "name": "f", "arguments": "[" * 40_000} for k in range(30)]
    for escaped in (False, True):
        raw = json.dumps({"input": calls})
        raw = raw.replace("[" * 40_000, "\\u005b" * 40_000) if escaped else raw
        with pytest.raises(WireError, match="texts more than"):
            Bodies().decode(raw.encode(), "responses")


@pytest.mark.parametrize("cli", captured())
def test_real_histories_are_far_from_it(cli: str) -> None:
    """The longest recorded one, over and over up to a million tokens, with an image."""
    turn = max(
        (t for turns in load_capture(cli).values() for t in turns if t["body"]), key=lambda t: len(str(t["body"]))
    )
    body, wire = turn["body"], wire_for(turn["path"])
    field = next(name for name in ("messages", "input", "contents") if name in body)
    one, image = len(json.dumps(body[field])), {"role": "user", "content": "QUJD" * 500_000, "parts": []}
    raw = json.dumps({**body, field: [*body[field] * (4_000_000 // one), image]}).encode()
    assert len(raw) > 5_000_000
    assert len(Bodies().decode(raw, wire.name)[field]) > 100


_json = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.text('a",[{\\\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a",[{\\', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def _count(value: Any) -> int:
    """Values within a value; an empty container counts for one."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if held is None else max(1, len(held)) + sum(map(_count, held))


@few
@given(_json, st.sampled_from([None, 1]), st.integers(1, 9))
def test_values_are_counted_outside_of_strings(value: Any, indent: int | None, piece: int) -> None:
    raw, count = json.dumps(value, indent=indent).encode(), _count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "_PIECE", piece)
        patch.setattr(values, "_BARE", 1_000_000)
        assert values._within(raw, max(1, count))
        assert not count or not values._within(raw, count - 1)


def test_many_pieces_of_a_message_are_each_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Counted(transcript._Pieces):
        def __iter__(self) -> Any:
            nonlocal looked
            for piece in super().__iter__():
                looked += 1
                yield piece

    monkeypatch.setattr(transcript, "_Pieces", Counted)
    turn = "0" * 20
    items = [{"type": "function_call", "call_id": f"call_{turn}_{k}", "name": "f"} for k in range(1_000)]
    blank = {"type": "message", "role": "assistant", "content": "", "id": f"msg_{turn}"}
    for many in (items, [blank] * 1_000):
        asked = wire_for("/v1/responses").parse({"input": [{"role": "user", "content": "go"}, *many]}, {})
        assert [m.role for m in asked.messages] == ["user", "assistant"]
    assert looked <= 2_000


async def test_many_messages_are_not_rendered_on_the_event_loop(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    extend, where = rig.engine.fmt.extend, []

    def watched(*args: Any) -> Any:
        where.append(threading.current_thread() is threading.main_thread())
        return extend(*args)

    monkeypatch.setattr(rig.engine.fmt, "extend", watched)
    assert (await rig.messages(ask("go")))[0] == 200
    texts = ["go", "reply 0", "next"]
    assert (await rig.messages(ask(*texts)))[0] == 200
    more = ask(*texts, "reply 1")
    more["messages"] += [{"role": "user", "content": "x"}] * 1_000
    assert (await rig.messages(more))[0] == 200
    assert where == [True, False]


def test_what_a_long_id_names_is_not_kept() -> None:
    known = short_id("call_1")
    for number in range(10_000):
        short_id(f"{number}" + "x" * 1_000)
    from sandlot.chat import roles

    before = roles._known_short_id.cache_info()
    assert short_id("call_1") == known
    assert roles._known_short_id.cache_info().hits == before.hits + 1


def test_sizes_are_those_of_all_texts() -> None:
    call = ToolCall("name", {"key": ["four", {"k": 1}]}, "id")
    assert Message("assistant", "text", "thought", (call,)).size == len("textthoughtnameidkeyfourk")
