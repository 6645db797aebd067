"""Anthropic's message threads, as the official SDK uses them: each request sends new messages alone."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from support.policy import call_text
from support.rig import BASH, MakeRig, Rig
from support.told_agents import in_turn, thinking

ASK: Any = {"model": "m", "max_tokens": 1000}
ADDED = {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Late"}}]}


def client_of(rig: Rig) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=rig.url, api_key=rig.opened.api_key, max_retries=0)


@anthropic.beta_async_tool(name="Bash")
async def bash(command: str) -> str:
    """Run a command."""
    return f"café of {command}"


async def proven(rig: Rig, samples: int = 1) -> None:
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == samples
    assert sum(sum(s.loss_mask) for s in finished.samples) == sum(len(ids) for ids in rig.engine.sampled)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_works_in_one_branch(make_rig: MakeRig, stream: bool) -> None:
    two = f"{call_text('Bash', {'command': 'ls'})}\n{call_text('Bash', {'command': 'id'})}"
    rig = await make_rig(in_turn([thinking("hm", f"I look.\n{two}"), call_text("Bash", {"command": "pwd"}), "Done."]))
    async with client_of(rig) as client:
        runner: Any = client.beta.messages.tool_runner(
            **ASK, system="Be brief.", tools=[bash], messages=[{"role": "user", "content": "go"}], stream=stream
        )
        last = await runner.until_done()
    assert [block.text for block in last.content] == ["Done."]
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, turns[0].id, turns[1].id]
    assert rig.session.forks == []
    told = rig.engine.fmt.tokenizer.decode(rig.engine.prompts[-1])
    assert all(told.count(f"café of {command}") == 1 for command in ("ls", "id", "pwd"))
    await proven(rig)


async def test_it_is_the_history_sent_whole(make_rig: MakeRig) -> None:
    """System prompt and tools, also those that are told of later, are the ones that the thread began with."""
    rig = await make_rig()
    late = {**BASH, "name": "Late", "defer_loading": True}
    offered: Any = {"system": "Be brief.", "tools": [BASH, late]}
    async with client_of(rig) as client:
        thread: Any = client.beta.messages.thread(**ASK, **offered)
        first = await thread.send({"role": "user", "content": "go"})
        more: Any = ({"role": "user", "content": "on"}, ADDED)
        await thread.send(*more)
        history: Any = [{"role": "user", "content": "go"}, {"role": "assistant", "content": first.content}, *more]
        await client.beta.messages.create(**ASK, **offered, messages=history)
        await thread.send({"role": "user", "content": "and then?"})
    second, whole = rig.engine.prompts[1:3]
    assert second == whole
    assert '"name":"Late"' in rig.engine.fmt.tokenizer.decode(second)
    turns = rig.session.turns
    assert [t.parent for t in turns] == [None, turns[0].id, turns[0].id, turns[1].id]
    assert [reason for _, reason in rig.session.forks] == ["the same history again"]
    await proven(rig, samples=2)


async def test_a_thread_that_is_lost_begins_again(make_rig: MakeRig) -> None:
    """Another session knows nothing of it: the SDK is told so in the words by which it sends the whole history."""
    rig = await make_rig()
    other = rig.gateway.open()
    async with client_of(rig) as client:
        thread: Any = client.beta.messages.thread(**ASK)
        await thread.send({"role": "user", "content": "go"})
        client.api_key = other.api_key
        await thread.send({"role": "user", "content": "on"})
        await thread.send({"role": "user", "content": "further"})
    turns = other.session.turns
    assert [t.parent for t in turns] == [None, turns[0].id]
    assert len(rig.session.turns) == 1


async def test_what_a_thread_cannot_have_is_refused_by_name(make_rig: MakeRig) -> None:
    rig = await make_rig()
    message: Any = {"role": "user", "content": "go"}
    async with client_of(rig) as client:
        alone = await client.beta.messages.create(**ASK, messages=[message])
        kept = await client.beta.messages.create(
            **ASK, messages=[message], system="Be brief.", tools=[BASH], thread={"type": "create"}
        )

        async def go_on(previous: str, **more: Any) -> Any:
            thread: Any = {"type": "continue", "previous_message_id": previous}
            return await client.beta.messages.create(**ASK, messages=[message], thread=thread, **more)

        for nobody in (alone.id, "msg_nobody"):
            with pytest.raises(anthropic.NotFoundError, match=f"{nobody}.*send the whole history") as lost:
                await go_on(nobody)
            assert lost.value.body["error"]["details"] == {"error_code": "thread_not_found"}
        await go_on(kept.id, system="Be brief.", tools=[BASH])
        for other in ({"system": "Be long."}, {"tools": [{**BASH, "name": "Other"}]}):
            with pytest.raises(anthropic.BadRequestError, match=rf"{next(iter(other))}: a thread keeps") as differs:
                await go_on(kept.id, **other)
            assert differs.value.body["error"]["details"] == {"error_code": "thread_fingerprint_mismatch"}
        with pytest.raises(anthropic.BadRequestError, match="'fork' is unknown here") as unknown:
            await client.beta.messages.create(**ASK, messages=[message], extra_body={"thread": {"type": "fork"}})
        assert unknown.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert len(rig.session.turns) == 3
