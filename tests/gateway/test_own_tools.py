"""The Responses tools that have types of their own and the client runs: `local_shell`, `shell` and `apply_patch`.

The official SDK is the client, and its types say what an item and an event must look like.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseInputItem, ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from support.policy import Say, call_text
from support.rig import MakeRig, Rig

TOOLS: Any = [{"type": "local_shell"}, {"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}]
OUTPUT: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
INPUT: TypeAdapter[Any] = TypeAdapter(ResponseInputItem)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
UNTYPED = "response.apply_patch_call_operation_diff"
"""Events that the vendor sends and the SDK passes on, but has no types for."""

COMMAND = {"command": ["ls", "-a"], "timeout_ms": 5000, "working_directory": "/w", "env": {"A": "é"}, "user": "me"}
CHANGES = (
    {"type": "create_file", "path": "a.txt", "diff": "+hi\n"},
    {"type": "update_file", "path": "a.txt", "diff": "@@\n-hi\n+ho\n"},
    {"type": "delete_file", "path": "a.txt"},
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("local_shell", COMMAND),
    ("local_shell", {"command": ["id"]}),
    ("shell", {"commands": ["ls", "pwd"], "timeout_ms": 9, "max_output_length": 100}),
    ("shell", {"commands": []}),
    *(("apply_patch", change) for change in CHANGES),
]
# What an item of such a call has no place for.
LOOSE: list[tuple[str, dict[str, Any]]] = [
    ("local_shell", {"command": ["id"], "env": {}, "user": None, "working_directory": ""}),
    ("shell", {"commands": ["id"], "timeout_ms": None}),
    ("apply_patch", {"type": "delete_file", "path": "a", "diff": ""}),
    ("apply_patch", {"type": "create_file", "path": "a", "diff": ""}),
]
MALFORMED: list[tuple[str, dict[str, Any] | str]] = [
    ("shell", {"command": "ls"}),
    ("shell", {"commands": "ls"}),
    ("shell", {"commands": ["ls"], "why": "x"}),
    ("shell", {"commands": ["ls"], "timeout_ms": "soon"}),
    ("shell", '{"commands": ["ls"'),
    ("shell", "[1]"),
    ("local_shell", {"command": ["ls"], "env": {"A": 1}}),
    ("local_shell", {}),
    ("apply_patch", {"type": "move_file", "path": "a"}),
    ("apply_patch", {"type": "create_file", "path": "a"}),
    ("apply_patch", {"type": "delete_file", "path": "a", "diff": "-hi"}),
    ("apply_patch", {"path": "a"}),
]


def script(*replies: str) -> Say:
    return lambda prompt, number: replies[min(number, len(replies) - 1)]


def client_of(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=rig.opened.api_key, max_retries=0)


async def answered(rig: Rig, stream: bool, items: Any, **more: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The output items of one response, valid by the SDK's types, and its events."""
    body: dict[str, Any] = {"model": "m", "input": items, "tools": TOOLS, **more}
    events: list[Any] = []
    async with client_of(rig) as client:
        if stream:
            async with client.responses.stream(**body) as streamed:
                events = [event async for event in streamed]
                response: Any = await streamed.get_final_response()
        else:
            response = await client.responses.create(**body)
    for event in events:
        if not event.type.startswith(UNTYPED):
            EVENT.validate_python(event.model_dump(mode="json", warnings=False))
    given = [item.model_dump(mode="json", warnings=False) for item in response.output]
    for item in given:
        OUTPUT.validate_python(item)
    return [{key: value for key, value in item.items() if value is not None} for item in given], events


def result(item: dict[str, Any]) -> dict[str, Any] | None:
    """What a client answers a call with, valid by the SDK's types."""
    call_id = item.get("call_id")
    outputs: dict[str, dict[str, Any]] = {
        "local_shell_call": {"type": "local_shell_call_output", "id": call_id, "output": "ran it"},
        "shell_call": {
            "type": "shell_call_output",
            "call_id": call_id,
            "output": [
                {"stdout": "a.txt\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}},
            ],
        },
        "apply_patch_call": {"type": "apply_patch_call_output", "call_id": call_id, "status": "failed"},
        "function_call": {"type": "function_call_output", "call_id": call_id, "output": "no such tool"},
    }
    if (output := outputs.get(item["type"])) is not None:
        INPUT.validate_python(output)
    return output


async def replayed(rig: Rig, stream: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    """Calls, their results sent back in another order, and the next turn: all in one branch, all proven."""
    history: list[Any] = [{"role": "user", "content": "go"}]
    items, events = await answered(rig, stream, history)
    results = [output for item in items if (output := result(item))]
    await answered(rig, stream, [*history, *items, *reversed(results)])
    first, second = rig.session.turns
    assert second.parent == first.id
    assert rig.session.forks == []
    known = list(rig.session.tree.ids(first.id))
    assert rig.engine.prompts[1][: len(known)] == known
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == 1
    return [item for item in items if item["type"] != "reasoning"], events


@pytest.mark.parametrize("stream", [False, True])
async def test_each_is_called_in_its_own_form(make_rig: MakeRig, stream: bool) -> None:
    rig = await make_rig(script("\n".join(call_text(name, arguments) for name, arguments in CALLS), "Done."))
    items, events = await replayed(rig, stream)
    assert [item["type"] for item in items] == [f"{name}_call" for name, _ in CALLS]
    assert {item["status"] for item in items} == {"completed"}
    assert len({item["id"] for item in items} | {item["call_id"] for item in items}) == 2 * len(CALLS)
    assert items[0]["action"] == {"type": "exec", **COMMAND}
    assert items[1]["action"]["env"] == {}
    assert items[2]["action"] == CALLS[2][1]
    assert items[3]["action"]["commands"] == []
    assert [item["operation"] for item in items[4:]] == list(CHANGES)
    assert rig.session.counters.calls == {"ok": len(CALLS)}
    decode = rig.engine.fmt.tokenizer.decode
    for tool in TOOLS:
        assert f'"name": "{tool["type"]}"' in decode(rig.engine.prompts[0])
    assert "ran it" in decode(rig.engine.prompts[1])
    assert "a.txt\n[exit code 0]\nslow\n[timed out]" in decode(rig.engine.prompts[1])
    assert "failed" in decode(rig.engine.prompts[1])
    assert bool(events) == stream


async def test_commands_and_patches_have_events_of_their_own(make_rig: MakeRig) -> None:
    rig = await make_rig(script("\n".join(call_text(name, arguments) for name, arguments in CALLS)))
    _, events = await answered(rig, True, "go")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    shells = [e for e in events if e.type.startswith("response.shell_call_command")]
    assert [(e.type.rpartition(".")[2], e.command_index) for e in shells] == [
        (kind, index) for index in (0, 1) for kind in ("added", "delta", "done")
    ]
    assert [e.delta for e in shells if e.type.endswith("delta")] == ["ls", "pwd"]
    patches = [e for e in events if e.type.startswith(UNTYPED)]
    texts = [e.delta if e.type.endswith("delta") else e.diff for e in patches]
    assert texts == [change["diff"] for change in CHANGES[:2] for _ in range(2)]
    begun = {e.output_index: e.item for e in events if e.type == "response.output_item.added"}
    ended = {e.output_index: e.item for e in events if e.type == "response.output_item.done"}
    assert [item.id for item in begun.values()] == [item.id for item in ended.values()]
    assert begun[shells[0].output_index].action.commands == []
    assert [begun[e.output_index].operation.diff for e in patches] == [""] * 4
    for event in (*shells, *patches):
        added = next(i for i, e in enumerate(events) if getattr(e, "item", None) is begun[event.output_index])
        done = next(i for i, e in enumerate(events) if getattr(e, "item", None) is ended[event.output_index])
        assert added < events.index(event) < done


@pytest.mark.parametrize(("name", "arguments"), LOOSE, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_is_null_or_empty_is_no_change(make_rig: MakeRig, name: str, arguments: dict[str, Any]) -> None:
    rig = await make_rig(script(call_text(name, arguments), "Done."))
    (item,), _ = await replayed(rig, False)
    assert item["type"] == f"{name}_call"


@pytest.mark.parametrize(("name", "arguments"), MALFORMED)
async def test_a_call_of_another_shape_is_the_agents_to_refuse(
    make_rig: MakeRig, name: str, arguments: dict[str, Any] | str
) -> None:
    rig = await make_rig(script(call_text(name, arguments), "Done."))
    (item,), _ = await replayed(rig, False)
    assert (item["type"], item["name"]) == ("function_call", name)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, separators=(",", ":"))
    assert item["arguments"] == text


async def test_an_earlier_response_is_gone_on_from_by_its_id(make_rig: MakeRig) -> None:
    rig = await make_rig(script(call_text("shell", {"commands": ["ls"]}), "Done."))
    async with client_of(rig) as client:
        first: Any = await client.responses.create(model="m", input="go", tools=TOOLS)
        (call,) = [item for item in first.output if item.type == "shell_call"]
        ran: Any = result({"type": "shell_call", "call_id": call.call_id})
        await client.responses.create(model="m", input=[ran], tools=TOOLS, previous_response_id=first.id)
    assert [turn.parent for turn in rig.session.turns] == [None, rig.session.turns[0].id]
    assert rig.session.forks == []


async def test_an_edited_command_is_another_branch(make_rig: MakeRig) -> None:
    rig = await make_rig(script(call_text("shell", {"commands": ["ls"]}), "Done."))
    items, _ = await answered(rig, False, "go")
    call = next(item for item in items if item["type"] == "shell_call")
    history = [{"role": "user", "content": "go"}, *items, result(call)]
    await answered(rig, False, history)
    call["action"]["commands"] = ["rm -r ."]
    await answered(rig, False, history)
    ((_, reason),) = rig.session.forks
    assert "edited arguments" in reason


async def test_skills_are_told_and_a_vendors_own_shell_is_left_out(make_rig: MakeRig) -> None:
    rig = await make_rig()
    decode = rig.engine.fmt.tokenizer.decode
    skill = {"name": "pdf", "description": "Reads PDFs.", "path": "/skills/pdf"}
    await answered(rig, False, "go", tools=[{"type": "shell", "environment": {"type": "local", "skills": [skill]}}])
    assert "- pdf (/skills/pdf): Reads PDFs." in decode(rig.engine.prompts[0])
    for kind in ("container_auto", "container_reference"):
        await answered(rig, False, "go", tools=[{"type": "shell", "environment": {"type": kind}}])
        assert '"shell"' not in decode(rig.engine.prompts[-1])
