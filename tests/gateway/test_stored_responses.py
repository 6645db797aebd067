"""`previous_response_id`, as the official SDK uses it: the session's own turns gone on from by their ids."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.policy import call_text
from support.rig import BASH, MakeRig, Rig

TOOL: Any = {"type": "function", "name": "exec", "parameters": BASH["input_schema"], "strict": False}
CALLS = call_text("exec", {"command": "ls"}, before="<think>\nhm\n</think>\n\nI look.\n")


def client_of(rig: Rig, key: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=key or rig.opened.api_key, max_retries=0)


async def ask(client: openai.AsyncOpenAI, text: Any, previous: Any = None, *, stream: bool = False, **more: Any) -> Any:
    """The response to new input alone."""
    body: dict[str, Any] = {"model": "m", "input": text, "tools": [TOOL], **more}
    if previous is not None:
        body["previous_response_id"] = previous.id
    if not stream:
        return await client.responses.create(**body)
    events: list[Any] = [event async for event in await client.responses.create(stream=True, **body)]
    return events[-1].response


def results(response: Any) -> list[dict[str, str]]:
    """A result for each call."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": "r"} for c in reversed(calls)]


@pytest.mark.parametrize("stream", [False, True])
async def test_new_input_alone_goes_on_in_one_branch(make_rig: MakeRig, stream: bool) -> None:
    said = [CALLS, f"{CALLS}\n{call_text('exec', {'command': 'id'})}", "  Done. \n"]
    rig = await make_rig(lambda prompt, number: said[min(number, 2)])
    async with client_of(rig) as client:
        first = await ask(client, "Look.", stream=stream, instructions="Be brief.")
        second = await ask(client, results(first), first, stream=stream, instructions="Be brief.")
        third = await ask(client, results(second), second, stream=stream, instructions="Be brief.")
        await ask(client, "And now?", third, stream=stream, instructions="Be brief.")
    assert (second.previous_response_id, second.store) == (first.id, True)
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]
    assert rig.session.forks == []
    for before, prompt in zip(turns, rig.engine.prompts[1:], strict=False):
        known = list(rig.session.tree.ids(before.id))
        assert prompt[: len(known)] == known
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    (sample,) = finished.samples
    assert sum(sample.loss_mask) == sum(len(ids) for ids in rig.engine.sampled)


async def test_what_is_kept_of_a_response_is_what_is_new_in_it(make_rig: MakeRig) -> None:
    rig = await make_rig()
    response = None
    async with client_of(rig) as client:
        for number in range(5):
            response = await ask(client, f"ask {number}", response, instructions="Be brief.")
    kept = list(rig.session._stored.values())
    assert [[m.text for m in stored.since] for stored in kept] == [[f"ask {n}", f"reply {n}"] for n in range(5)]
    assert [m.text for m in kept[-1].messages] == [text for n in range(5) for text in (f"ask {n}", f"reply {n}")]


async def test_it_is_the_history_sent_whole(make_rig: MakeRig) -> None:
    """The prompt by id is the prompt of the same request with all items in it, and either goes on from the other."""
    said = [CALLS, "Done.", "Done.", "More."]
    rig = await make_rig(lambda prompt, number: said[number])
    async with client_of(rig) as client:
        first = await ask(client, "Look.")
        items = [item.model_dump(exclude_none=True, mode="json") for item in first.output]
        history: list[Any] = [{"role": "user", "content": "Look."}, *items, *results(first)]
        by_id = await ask(client, results(first), first)
        await ask(client, history)
        more = [item.model_dump(exclude_none=True, mode="json") for item in by_id.output]
        await ask(client, [*history, *more, {"role": "user", "content": "Go on."}])
    assert rig.engine.prompts[1] == rig.engine.prompts[2]
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, turns[0].id, turns[0].id, turns[1].id]


async def test_two_requests_from_one_response_are_two_branches(make_rig: MakeRig) -> None:
    rig = await make_rig(lambda prompt, number: f"reply {number}")
    async with client_of(rig) as client:
        first = await ask(client, "go")
        left, right = await ask(client, "left", first), await ask(client, "right", first)
        await ask(client, "on", left)
        await ask(client, "on", right)
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, turns[0].id, turns[0].id, turns[1].id, turns[2].id]
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == 2
    assert sum(sum(s.loss_mask) for s in finished.samples) == sum(len(ids) for ids in rig.engine.sampled)


async def test_instructions_and_tools_are_those_of_the_request(make_rig: MakeRig) -> None:
    """As with the vendor: neither is carried over. Others make another branch, for the prompt begins otherwise."""
    rig = await make_rig()
    async with client_of(rig) as client:
        first = await ask(client, "go", instructions="Be brief.")
        await ask(client, "on", first, instructions="Be long.")
        await ask(client, "on", first, instructions="Be brief.", tools=[])
    decode = rig.engine.fmt.tokenizer.decode
    assert "Be brief." not in decode(rig.engine.prompts[1])
    assert [reason for _, reason in rig.session.forks] == [
        "message 0 (system) differs: 'Be long.'",
        "other tools are offered",
    ]


async def test_what_is_not_kept_is_not_found(make_rig: MakeRig) -> None:
    rig = await make_rig()
    other = rig.gateway.open()
    async with client_of(rig) as client, client_of(rig, other.api_key) as stranger:
        kept, dropped = await ask(client, "go"), await ask(client, "other", store=False)
        assert (kept.store, dropped.store) == (True, False)
        for who, previous in ((client, dropped), (stranger, kept)):
            with pytest.raises(openai.NotFoundError, match=r"previous_response_id.*send the whole history"):
                await ask(who, "on", previous)
        with pytest.raises(openai.NotFoundError, match="resp_nobody"):
            await client.responses.create(model="m", input="on", previous_response_id="resp_nobody")
        again = await ask(client, "on", kept, store=False)
        with pytest.raises(openai.NotFoundError):
            await ask(client, "further", again)
    assert len(rig.engine.prompts) == 3


async def test_tools_that_a_search_found_stay_callable(make_rig: MakeRig) -> None:
    said = [call_text("tool_search", {"query": "q"}), call_text("agents__spawn", {}), call_text("agents__spawn", {})]
    rig = await make_rig(lambda prompt, number: said[min(number, 2)])
    search = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
    found = [{"type": "namespace", "name": "agents", "description": "d", "tools": [spawn]}]
    async with client_of(rig) as client:
        first = await ask(client, "go", tools=[search])
        (call,) = [item for item in first.output if item.type == "tool_search_call"]
        output = {"type": "tool_search_output", "call_id": call.call_id, "tools": found, "execution": "client"}
        second = await ask(client, [output], first, tools=[search])
        third = await ask(client, results(second), second, tools=[search])
    assert [(i.name, i.namespace) for i in third.output if i.type == "function_call"] == [("spawn", "agents")]
    assert rig.session.counters.calls == {"ok": 3}
    assert rig.session.forks == []
