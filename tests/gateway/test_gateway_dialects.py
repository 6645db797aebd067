"""OpenAI Responses and Google through a served gateway: one branch, one proof, whatever the client speaks."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors, types

from sandlot.gateway import SessionLimits
from support.policy import Say, call_text
from support.rig import BASH, MakeRig, Rig, ask

PATCH = "*** Begin Patch\n*** Add File: a.txt\n+hi\n*** End Patch"
EXEC: dict[str, Any] = {"type": "function", "name": "exec", "parameters": BASH["input_schema"], "strict": False}
EDIT: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit files"}
SPAWN: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}


def script(*replies: str) -> Say:
    return lambda prompt, number: replies[min(number, len(replies) - 1)]


def responses(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=rig.opened.api_key, max_retries=0)


def google(rig: Rig) -> Any:
    return genai.Client(api_key=rig.opened.api_key, http_options=types.HttpOptions(base_url=rig.url)).aio


async def answered(rig: Rig, stream: bool, **body: Any) -> list[dict[str, Any]]:
    """The output items of one response."""
    async with responses(rig) as client:
        if not stream:
            response: Any = await client.responses.create(model="m", store=False, **body)
        else:
            events: list[Any] = [e async for e in await client.responses.create(model="m", stream=True, **body)]
            numbers = [e.sequence_number for e in events]
            assert numbers == list(range(len(numbers)))
            response = events[-1].response
    return [item.model_dump(exclude_none=True, mode="json") for item in response.output]


async def proven(rig: Rig, samples: int = 1) -> None:
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    assert len(finished.samples) == samples


@pytest.mark.parametrize("stream", [False, True])
async def test_codex_edits_a_file_in_one_branch(make_rig: MakeRig, stream: bool) -> None:
    """A freeform tool goes out as raw text and comes back as the recorded turn; so do searches and namespaces."""
    said = [
        "<think>\nfirst\n</think>\n\n" + call_text("apply_patch", {"input": PATCH}, before="I edit.\n"),
        call_text("tool_search", {"query": "spawn"}),
        call_text("agents__spawn", {"message": "go"}),
        call_text("exec", {"command": "ls"}) + "\n" + call_text("exec", {"command": "cat a.txt"}),
        "Done.",
    ]
    rig = await make_rig(script(*said))
    tools = [EXEC, EDIT, SEARCH, {"type": "web_search"}]
    history: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "go"}]
    kinds: list[list[str]] = []
    for _ in said:
        items = await answered(rig, stream, input=history, tools=tools)
        kinds.append([item["type"] for item in items if item["type"] != "reasoning"])
        history += items
        for item in items:
            if item["type"] == "tool_search_call":
                found = {"tools": [SPAWN], "execution": "client", "status": "completed"}
                history.append({"type": "tool_search_output", "call_id": item["call_id"], **found})
            elif "call_id" in item:
                kind = "custom_tool_call_output" if item["type"] == "custom_tool_call" else "function_call_output"
                history.append({"type": kind, "call_id": item["call_id"], "output": "ok"})
    assert kinds == [
        ["message", "custom_tool_call"],
        ["tool_search_call"],
        ["function_call"],
        ["function_call", "function_call"],
        ["message"],
    ]
    assert next(i for i in history if i.get("type") == "custom_tool_call")["input"] == PATCH
    spawned = next(i for i in history if i.get("name") == "spawn")
    assert (spawned["namespace"], json.loads(spawned["arguments"])) == ("agents", {"message": "go"})
    assert [t.parent for t in rig.session.turns] == [None, *(t.id for t in rig.session.turns[:-1])]
    assert rig.session.forks == []
    assert rig.session.counters.calls == {"ok": 5}
    for before, after in zip(rig.session.turns, rig.engine.prompts[1:], strict=False):
        known = rig.session.tree.ids(before.id)
        assert after[: len(known)] == list(known)
    await proven(rig)


async def test_a_deferred_tool_is_found_and_called_in_one_branch(make_rig: MakeRig) -> None:
    """As Claude Code declares those it has found, which the request before had not."""
    rig = await make_rig(script(call_text("ToolSearch", {"query": "fetch"}), call_text("WebFetch", {}), "Done."))
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    late = [{**search, "name": name, "defer_loading": True} for name in ("WebFetch", "Placeholder")]
    body = ask("go", tools=False)
    for found in ([{"type": "tool_reference", "tool_name": "WebFetch"}], "fetched", None):
        body["tools"] = [search, *(late[1:] if len(body["messages"]) == 1 else late)]
        status, told = await rig.messages(body)
        assert status == 200, told
        uses = [block for block in told["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": found} for use in uses]
        body["messages"] += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": results}]
    assert rig.session.counters.calls == {"ok": 2}
    assert rig.session.forks == []
    said = rig.engine.fmt.tokenizer.decode(rig.engine.prompts[-1])
    assert ("WebFetch" in said, "Placeholder" in said) == (True, False)
    await proven(rig)


@pytest.mark.parametrize("arguments", [{"patch": PATCH}, {"input": PATCH, "why": "x"}, {"input": 3}, "{broken", "[1]"])
async def test_a_freeform_call_of_another_shape_reaches_the_agent_and_stays_the_turn(
    make_rig: MakeRig, arguments: dict[str, Any] | str
) -> None:
    rig = await make_rig(script(call_text("apply_patch", arguments), "Done."))
    history: list[Any] = [{"role": "user", "content": "go"}]
    items = await answered(rig, False, input=history, tools=[EDIT])
    (custom,) = [item for item in items if item["type"] == "custom_tool_call"]
    assert custom["input"] == (
        arguments if isinstance(arguments, str) else json.dumps(arguments, separators=(",", ":"))
    )
    output = {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "invalid patch"}
    await answered(rig, False, input=[*history, *items, output], tools=[EDIT])
    assert rig.session.forks == []
    await proven(rig)


async def test_a_turn_of_text_only_is_known_by_its_reasoning_item(make_rig: MakeRig) -> None:
    """Two equal questions with two equal answers: the mark says which of them goes on."""
    rig = await make_rig(script("same", "same", "next"))
    first = await answered(rig, False, input="go")
    second = await answered(rig, False, input="go")
    assert [i["type"] for i in first] == ["reasoning", "message"]
    assert first[0]["encrypted_content"] != second[0]["encrypted_content"]
    history = [{"role": "user", "content": "go"}, *first, {"role": "user", "content": "on"}]
    await answered(rig, False, input=history)
    assert rig.session.turns[2].parent == rig.session.turns[0].id


async def test_what_is_not_stored_is_refused_by_name(make_rig: MakeRig) -> None:
    rig = await make_rig()
    for field, value in (("conversation", "conv_1"), ("background", True)):
        async with responses(rig) as client:
            with pytest.raises(openai.BadRequestError, match=f"^Error code: 400.*{field}"):
                await client.responses.create(model="m", input="go", **{field: value})
    async with responses(rig) as client:
        with pytest.raises(openai.BadRequestError, match="store: false"):
            await client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_1"}])
    assert rig.engine.prompts == []


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/s/{session}/v1/responses"])
async def test_a_websocket_is_answered_426(make_rig: MakeRig, path: str) -> None:
    rig = await make_rig()
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Authorization": f"Bearer {rig.opened.api_key}"}
    async with rig.http.get(rig.url + path.format(session=rig.session.id), headers=headers) as reply:
        assert reply.status == 426
        assert "POST" in (await reply.json())["error"]["message"]


async def test_a_slow_engine_is_kept_alive_in_every_dialect(make_rig: MakeRig) -> None:
    rig = await make_rig()
    rig.engine.hold = True
    bodies: dict[str, Any] = {
        "/v1/responses": {"model": "m", "input": "go", "stream": True},
        "/v1beta/models/m:streamGenerateContent?alt=sse": {"contents": [{"parts": [{"text": "go"}]}]},
        "/v1beta/models/m:streamGenerateContent": {"contents": [{"parts": [{"text": "go too"}]}]},
    }
    for path, body in bodies.items():
        rig.engine.asked.clear()
        rig.engine.release.clear()
        headers = {"Authorization": f"Bearer {rig.opened.api_key}"}
        async with rig.http.post(rig.url + path, json=body, headers=headers) as reply:
            assert reply.status == 200
            seen = b""
            mark = b"in_progress" if "responses" in path else b'"text":""'
            while seen.count(mark) < 4:
                seen += await reply.content.readany()
            rig.engine.release.set()
            seen += await reply.content.read()
        if path.endswith("streamGenerateContent"):
            assert reply.content_type == "application/json"
            chunks = json.loads(seen)
        elif "alt=sse" in path:
            assert reply.content_type == "text/event-stream"
            chunks = [json.loads(block.removeprefix("data: ")) for block in seen.decode().split("\n\n") if block]
        else:
            assert b"response.completed" in seen
            events = [json.loads(block.partition("data: ")[2]) for block in seen.decode().split("\n\n") if block]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            continue
        assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
        texts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
        assert "".join(texts).startswith("reply ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", ["all", "signature"])
async def test_google_in_one_branch_with_parallel_calls(make_rig: MakeRig, stream: bool, keep: str) -> None:
    """`signature`: the client drops thoughts and ids of calls, as real ones do, and keeps the signature only."""
    both = call_text("Bash", {"command": "ls"}) + "\n" + call_text("Bash", {"command": "pwd"})
    rig = await make_rig(script("<think>\nhm\n</think>\n\n" + both, "half", "Done."))
    tool = types.FunctionDeclaration(name="Bash", description="d", parameters_json_schema=BASH["input_schema"])
    config = types.GenerateContentConfig(system_instruction="s", tools=[types.Tool(function_declarations=[tool])])
    history: list[Any] = [types.Content(role="user", parts=[types.Part(text="go")])]
    client = google(rig)
    for number in range(3):
        if stream:
            answer = await client.models.generate_content_stream(model="m", contents=history, config=config)
            parts = [p for chunk in [c async for c in answer] for p in chunk.candidates[0].content.parts]
        else:
            whole = await client.models.generate_content(model="m", contents=history, config=config)
            parts = whole.candidates[0].content.parts
            counted = await client.models.count_tokens(model="m", contents=history) if number else None
            assert counted is None or counted.total_tokens > 0
        calls = [p.function_call for p in parts if p.function_call]
        assert len(calls) == (2 if number == 0 else 0)
        ids = [c.id for c in calls]
        if keep == "signature":
            parts = [p for p in parts if not p.thought and p.text != ""]
            for call in calls:
                call.id = None
            ids = [None] * len(calls)
        results = [
            types.Part(function_response=types.FunctionResponse(id=i, name="Bash", response={"output": f"out {k}"}))
            for k, i in enumerate(ids)
        ]
        history += [types.Content(role="model", parts=parts)]
        history += [types.Content(role="user", parts=results or [types.Part(text="on")])]
    await client.aclose()
    assert [t.parent for t in rig.session.turns] == [None, *(t.id for t in rig.session.turns[:2])]
    assert rig.session.forks == []
    await proven(rig)


async def test_counts_are_what_is_sampled_from(make_rig: MakeRig) -> None:
    rig = await make_rig()
    body = {"systemInstruction": {"parts": [{"text": "s"}]}, "contents": [{"role": "user", "parts": [{"text": "go"}]}]}
    headers = {"x-goog-api-key": rig.opened.api_key}
    url = f"{rig.url}/v1beta/models/m"
    for counted in (body, {"generateContentRequest": {"model": "models/m", **body}}):
        async with rig.http.post(f"{url}:countTokens", json=counted, headers=headers) as reply:
            total = (await reply.json())["totalTokens"]
    async with rig.http.post(f"{url}:generateContent", json=body, headers=headers) as reply:
        assert (await reply.json())["usageMetadata"]["promptTokenCount"] == total == len(rig.engine.prompts[0])
    asked = {"model": "m", "instructions": "s", "input": "go"}
    bearer = {"Authorization": f"Bearer {rig.opened.api_key}"}
    async with rig.http.post(f"{rig.url}/v1/responses/input_tokens", json=asked, headers=bearer) as reply:
        assert (await reply.json())["input_tokens"] == total


async def test_a_spent_budget_and_a_wrong_key_have_the_dialects_shape(make_rig: MakeRig) -> None:
    rig = await make_rig(limits=SessionLimits(turns=1))
    client = google(rig)
    await client.models.generate_content(model="m", contents="go")
    with pytest.raises(errors.ClientError, match="budget") as caught:
        await client.models.generate_content(model="m", contents="again")
    assert (caught.value.code, caught.value.status) == (403, "PERMISSION_DENIED")
    await client.aclose()
    async with responses(rig) as sdk:
        with pytest.raises(openai.PermissionDeniedError, match="budget"):
            await sdk.responses.create(model="m", input="again")
    url = f"{rig.url}/v1beta/models/m:generateContent"
    body = {"contents": [{"parts": [{"text": "x"}]}]}
    async with rig.http.post(url, json=body, headers={"x-goog-api-key": "wrong"}) as reply:
        wrong = (await reply.json())["error"]
    async with rig.http.post(url, json=body) as reply:
        none = (await reply.json())["error"]
    for error, says in ((wrong, "this API key opens no session"), (none, "no API key came")):
        assert (error["status"], error["message"][: len(says)]) == ("UNAUTHENTICATED", says)
    async with rig.http.post(f"{url}?key={rig.opened.api_key}", json=body) as reply:
        assert reply.status == 403
    for path in ("nowhere", f"models/m:embedContent?key={rig.opened.api_key}"):
        async with rig.http.get(f"{rig.url}/v1beta/{path}") as reply:
            assert (reply.status, (await reply.json())["error"]["status"]) == (404, "NOT_FOUND")
    async with rig.http.get(f"{rig.url}/v1/messages/batches") as reply:
        assert (reply.status, (await reply.json())["error"]["type"]) == (404, "not_found_error")
    async with rig.http.get(f"{rig.url}/v1/models", headers={"anthropic-version": "2023-06-01"}) as reply:
        assert (reply.status, (await reply.json())["error"]["type"]) == (401, "authentication_error")


async def test_the_model_is_told_to_every_sdk(make_rig: MakeRig) -> None:
    rig = await make_rig(max_context=5_000)
    client = google(rig)
    (listed,) = [model async for model in await client.models.list()]
    one = await client.models.get(model="any")
    assert [(m.name, m.input_token_limit) for m in (listed, one)] == [("models/toy", 5_000), ("models/any", 5_000)]
    await client.aclose()
    async with responses(rig) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["toy"]
        assert (await sdk.models.retrieve("org/any")).id == "org/any"
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key=rig.opened.api_key) as claude:
        (told,) = [model async for model in claude.models.list()]
        assert (told.type, told.display_name, told.max_input_tokens) == ("model", "toy", 5_000)
        assert (await claude.models.retrieve("any")).id == "any"


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1beta/models/m:generateContent"]
)
async def test_a_refusal_repeats_little_of_what_was_sent(make_rig: MakeRig, path: str) -> None:
    rig = await make_rig()
    message = {"role": "x" * 1_000_000, "content": "hi", "parts": []}
    body = {"messages": [message], "input": [message], "contents": [message]}
    bearer = {"Authorization": f"Bearer {rig.opened.api_key}"}
    async with rig.http.post(rig.url + path, json=body, headers=bearer) as reply:
        assert reply.status == 400
        assert len(await reply.read()) < 400


async def test_the_path_can_name_the_session_but_opens_nothing_without_its_key(make_rig: MakeRig) -> None:
    rig = await make_rig()
    other = rig.gateway.open("other")
    prefix = f"{rig.url}/s/{rig.session.id}"
    bodies: dict[str, Any] = {
        "/v1/messages": ask("hi"),
        "/v1/messages/count_tokens": ask("hi"),
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
        "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "x"}]}]},
    }
    for path, body in bodies.items():
        for key, status in ((rig.opened.api_key, 200), (other.api_key, 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with rig.http.post(prefix + path, json=body, headers=headers) as reply:
                assert reply.status == status, (path, await reply.text())
    assert other.session.turns == []
    bearer = {"Authorization": f"Bearer {rig.opened.api_key}"}
    async with rig.http.get(f"{prefix}/v1/models", headers=bearer) as reply:
        assert reply.status == 200
    async with rig.http.head(f"{prefix}/") as reply:
        assert reply.status == 200


async def test_a_call_nested_too_deeply_is_refused_in_the_dialects_shape(make_rig: MakeRig) -> None:
    """A policy may write one: sent back under its id it is only known again, and never rendered."""
    nested = '{"a":' * 600 + "1" + "}" * 600
    rig = await make_rig(script(call_text("exec", nested), "Done."))
    bearer = {"Authorization": f"Bearer {rig.opened.api_key}"}
    body: dict[str, Any] = {"model": "m", "tools": [EXEC], "input": [{"role": "user", "content": "go"}]}
    async with rig.http.post(f"{rig.url}/v1/responses", json=body, headers=bearer) as reply:
        calls = [item for item in (await reply.json())["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == [nested]
    foreign = {**body, "input": [*body["input"], calls[0] | {"call_id": "c", "arguments": nested.replace("a", "b")}]}
    function = {"name": "exec", "arguments": nested}
    asked = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    part = f'{{"functionCall":{{"name":"exec","args":{nested}}}}}'
    for path, text in (
        ("/v1/responses", json.dumps(foreign)),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "go"}, asked]})),
        ("/v1beta/models/m:generateContent", f'{{"contents":[{{"role":"model","parts":[{part}]}}]}}'),
    ):
        async with rig.http.post(rig.url + path, data=text, headers=bearer) as reply:
            told = (await reply.json())["error"]
            assert reply.status == 400, path
        assert "nested too deeply; send arguments and schemas that are flatter" in told["message"]
        assert told.get("type", told.get("status")) in ("invalid_request_error", "INVALID_ARGUMENT")
    assert len(rig.session.turns) == 1
    body["input"] += calls
    for _ in range(2):
        body["input"].append({"role": "user", "content": "on"})
        async with rig.http.post(f"{rig.url}/v1/responses", json=body, headers=bearer) as reply:
            assert reply.status == 200, await reply.text()
            body["input"] += (await reply.json())["output"]
    assert rig.session.forks == []


async def test_half_a_character_in_a_call_stays_in_the_branch(make_rig: MakeRig) -> None:
    """The policy writes one as an escape, the client sends it back, and cuts an output in the midst of another."""
    rig = await make_rig(script(call_text("exec", r'{"command": "printf \ud83d"}'), "Done."))
    headers = {"Authorization": f"Bearer {rig.opened.api_key}"}
    body: dict[str, Any] = {"model": "m", "tools": [EXEC], "input": [{"role": "user", "content": "go"}]}
    async with rig.http.post(f"{rig.url}/v1/responses", json=body, headers=headers) as reply:
        items = (await reply.json())["output"]
    (call,) = [item for item in items if item["type"] == "function_call"]
    assert json.loads(call["arguments"]) == {"command": "printf \ud83d"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "cut \ud83d"}
    body["input"] += [*items, result]
    async with rig.http.post(f"{rig.url}/v1/responses", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
    assert "cut \ufffd" in rig.engine.fmt.tokenizer.decode(rig.engine.prompts[1])
    assert rig.session.forks == []
    await proven(rig)
