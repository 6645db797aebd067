"""Recorded requests against a real gateway over every protocol, and against a server that fails in every way."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from sandlot.chat.format import TemplateFormat
from sandlot.cli.app import app, told_of
from sandlot.errors import ConfigError
from sandlot.gateway import Gateway, GatewayLimits
from sandlot.rollout.replay import Answered, Job, TryError, percentiles, replay, summary
from sandlot.rollout.replay_requests import kind_of, read_requests
from sandlot.rollout.replay_send import _asked_wait
from sandlot.trajectory.journal import read_journal
from sandlot.trajectory.rundir import RunDir
from support import engines
from support.policy import ToldEngine, call_text
from support.toy_model import make_toy_model

CAPTURES = Path(__file__).parents[1] / "captures"
USER = [{"role": "user", "content": "hello"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"model": "m", "messages": USER}),
    ("chat", {"model": "m", "messages": [{"role": "system", "content": "be"}, *USER], "stream": True}),
    ("anthropic", {"model": "claude-x", "max_tokens": 50, "messages": USER}),
    ("anthropic", {"model": "m", "max_tokens": 50, "messages": USER, "system": "be brief", "stream": True}),
    ("responses", {"model": "m", "input": "hello", "store": False}),
    ("responses", {"model": "m", "input": [{"role": "user", "content": "hello"}], "stream": True, "store": False}),
    ("google", {"model": "m", "contents": [{"role": "user", "parts": [{"text": "hello"}]}]}),
]


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


async def invoke(*argv: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON of stdout, everything said, of a `sandlot replay` in a thread of its own."""
    result = await asyncio.to_thread(CliRunner().invoke, app, ["replay", *argv, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout), result.output


# -- which protocol a line speaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_a_bare_body_is_known_by_its_shape(kind: str, body: dict[str, Any]) -> None:
    assert kind_of(body) == kind


def test_odd_values_are_left_to_the_server(tmp_path: Path) -> None:
    lines = [
        {"model": "m", "messages": USER, "tools": 3, "stream_options": "x", "stream": True},
        {"path": "/v1/responses", "body": {"input": 3}, "response": {"id": "r", "output": []}},
        {"path": "/v1/responses", "body": {"input": 3, "previous_response_id": "r"}},
    ]
    requests = list(read_requests(write_lines(tmp_path / "r.jsonl", lines)))
    assert requests[0].for_server().body["stream_options"] == {"include_usage": True}
    assert requests[0].body["tools"] == 3


@pytest.mark.parametrize("capture", sorted(CAPTURES.glob("*.json.gz")), ids=lambda p: p.name.partition(".")[0])
def test_requests_of_real_clients_are_known_by_their_shape_alone(capture: Path) -> None:
    recorded = json.loads(gzip.decompress(capture.read_bytes()))
    seen = 0
    for turns in recorded.values():
        for turn in turns:
            body = turn.get("body") or turn.get("request")
            if isinstance(body, dict) and (kind := kind_of(body, turn["path"])) is not None:
                assert kind_of(body) == kind, turn["path"]
                seen += 1
    assert seen > 0


def test_lines_with_a_path_and_batch_files_are_read(tmp_path: Path) -> None:
    lines = [
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": USER}},
        {"path": "/v1/messages?beta=true", "body": {"model": "m", "messages": USER}},
        {"path": "/v1beta/models/gem-2:streamGenerateContent?alt=sse", "request": {"contents": []}},
    ]
    chat, anthropic, google = read_requests(write_lines(tmp_path / "r.jsonl", lines))
    assert (chat.kind, chat.path, chat.stream) == ("chat", "/v1/chat/completions", False)
    assert (anthropic.kind, anthropic.headers("k")["x-api-key"]) == ("anthropic", "k")
    assert (google.model, google.path) == ("gem-2", "/v1beta/models/gem-2:streamGenerateContent?alt=sse")
    other = google.for_server(model="x", stream=False)
    assert other.path == "/v1beta/models/x:generateContent"
    streamed = chat.for_server(model="x", stream=True)
    assert streamed.body["stream_options"] == {"include_usage": True}
    assert streamed.for_server(stream=False).body == {"model": "x", "messages": USER, "stream": False}
    assert chat.for_server().body == chat.body


def test_a_request_that_goes_on_from_a_response_is_sent_whole(tmp_path: Path) -> None:
    """Two conversations side by side, one of which splits; an answer may stand in its line as batch files have it."""
    call = {"type": "function_call", "call_id": "c1", "name": "exec", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}

    def line(items: Any, previous: str | None, given: Any, **more: Any) -> dict[str, Any]:
        body = {"model": "m", "input": items} | ({"previous_response_id": previous} if previous else {})
        return {"path": "/v1/responses", "body": body | more, "response": given}

    lines = [
        line("go", None, {"id": "resp_a", "output": [call]}, instructions="Be brief."),
        line(USER, None, {"status_code": 200, "body": {"id": "resp_b", "output": [said]}}),
        line([result], "resp_a", {"id": "resp_c", "output": [said]}, instructions="Be long."),
        line("more", "resp_b", None),
        line("left", "resp_c", {"error": "cut"}),
        line("right", "resp_c", None),
    ]
    requests = list(read_requests(write_lines(tmp_path / "r.jsonl", lines)))
    go, left, right = ({"role": "user", "content": text} for text in ("go", "left", "right"))
    assert [request.body["input"] for request in requests] == [
        "go",
        USER,
        [go, call, result],
        [*USER, said, {"role": "user", "content": "more"}],
        [go, call, result, said, left],
        [go, call, result, said, right],
    ]
    assert not any("previous_response_id" in request.body for request in requests)
    assert [request.body.get("instructions") for request in requests[:3:2]] == ["Be brief.", "Be long."]


def test_a_message_thread_is_sent_whole(tmp_path: Path) -> None:
    """With the system prompt and the tools that it began with; a request beside it stays as it is."""
    use = {"type": "tool_use", "id": "t1", "name": "exec", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "r"}]}
    said = [{"type": "text", "text": "Done."}]
    begun = {"model": "m", "max_tokens": 9, "system": "Be brief.", "tools": [{"name": "exec", "input_schema": {}}]}

    def further(message: Any, previous: str) -> dict[str, Any]:
        thread = {"type": "continue", "previous_message_id": previous}
        return {"model": "m", "max_tokens": 9, "messages": [message], "thread": thread}

    go, on, beside = ({"role": "user", "content": text} for text in ("go", "on", "beside"))
    lines = [
        {
            "body": {**begun, "messages": [go], "thread": {"type": "create"}},
            "response": {"id": "msg_a", "content": [use]},
        },
        {"body": {**begun, "messages": [beside]}, "response": {"id": "msg_x", "content": said}},
        {"path": "/v1/messages", "body": further(result, "msg_a"), "response": {"id": "msg_b", "content": said}},
        {"path": "/v1/messages", "body": further(on, "msg_b")},
    ]
    requests = list(read_requests(write_lines(tmp_path / "r.jsonl", lines)))
    first = [go, {"role": "assistant", "content": [use]}, result]
    assert [request.body for request in requests] == [
        {**begun, "messages": messages}
        for messages in ([go], [beside], first, [*first, {"role": "assistant", "content": said}, on])
    ]
    lost = {"path": "/v1/messages", "body": further(on, "msg_x")}
    with pytest.raises(ConfigError, match="goes on from response 'msg_x'"):
        list(read_requests(write_lines(tmp_path / "r.jsonl", [*lines, lost])))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no request"),
        (
            '{"model": "m", "input": "a"}\n{"model": "m", "input": "b", "previous_response_id": "resp_1"}\n',
            "r.jsonl:2 goes on from response 'resp_1', .* record requests with their whole history",
        ),
        ('{"model": "m", "messages": []}\n{"prompt": "x"}\n', "r.jsonl:2 is no request that is known"),
        ('{"messages": [\n', "r.jsonl:1 is no JSON"),
        ("[1]\n", "r.jsonl:1 is no JSON object"),
        ('{"path": "/v1/models?key=secret", "body": {"messages": []}}\n', "went to /v1/models, which is no call"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        list(read_requests(tmp_path / "r.jsonl"))


# -- the driver ------------------------------------------------------------------------------------------------------


async def test_chains_are_in_order_and_only_so_many_run_at_once() -> None:
    running: set[str] = set()
    most = 0
    order: list[str] = []

    def job(name: str) -> Job:
        async def send() -> Answered:
            nonlocal most
            running.add(name)
            most = max(most, len(running))
            await asyncio.sleep(0.01)
            running.discard(name)
            order.append(name)
            if name == "c2-1":
                raise TryError("no", retryable=False)
            return Answered(200, "stop", 1, 2)

        return Job(name, "x", send)

    chains = ([job(f"c{c}-{k}") for k in range(3)] for c in range(4))
    results = await replay(chains, concurrency=2, retries=3)
    assert most == 2
    for chain in range(4):
        assert [n for n in order if n.startswith(f"c{chain}")] == [f"c{chain}-{k}" for k in range(3)]
    assert [r.number for r in results] == list(range(12))
    assert [r.name for r in results if not r.ok] == ["c2-1"]
    told = summary(results, 2.0)
    assert (told["ok"], told["failed"], told["output_tokens"], told["errors"]) == (11, 1, 22, {"no": 1})
    assert told["requests_per_s"] == 5.5


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).exponential(size=500).tolist()
    told = percentiles(values)
    assert told is not None
    assert told["p95"] == pytest.approx(float(np.percentile(values, 95)), abs=1e-3)
    assert told["p50"] <= told["p95"] <= told["p99"] <= told["max"]
    assert percentiles([]) is None


# -- a served gateway ------------------------------------------------------------------------------------------------


@pytest.fixture
async def served(fmt: TemplateFormat) -> AsyncIterator[tuple[Gateway, ToldEngine, str, str]]:
    engine = ToldEngine(fmt, lambda prompt, number: f"this is reply number {number}")
    async with Gateway(engine.policy(), limits=GatewayLimits(engine_retry_delays=(), grace=0.01)) as gateway:
        opened = gateway.open("replayed")
        yield gateway, engine, f"http://127.0.0.1:{await gateway.serve()}", opened.api_key


@pytest.mark.parametrize("flag", [[], ["--stream"], ["--no-stream"]])
async def test_every_protocol_is_replayed_to_a_gateway(
    served: tuple[Gateway, ToldEngine, str, str], tmp_path: Path, flag: list[str]
) -> None:
    _, engine, url, key = served
    file = write_lines(tmp_path / "r.jsonl", [body for _, body in REQUESTS])
    out = tmp_path / "results.jsonl"
    argv = [str(file), "--base-url", f"{url}/v1", "--api-key", key, "--repeat", "2", "-j", "3", "--out", str(out)]
    status, told, said = await invoke(*argv, *flag)
    assert (status, told["requests"], told["ok"], told["failed"]) == (0, 14, 14, 0), said
    assert told["kinds"] == {k: 2 * n for k, n in Counter(kind for kind, _ in REQUESTS).items()}
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["number"] for r in results) == list(range(14))
    for result in results:
        assert result["ok"]
        assert result["status"] == 200
        assert result["input_tokens"] > 0
        assert result["output_tokens"] > 0, result
        assert result["finish"]
    streamed = {"": 3, "--stream": 7, "--no-stream": 0}["".join(flag)]
    assert sum(r["first_s"] is not None for r in results) == 2 * streamed
    assert all(r["first_s"] <= r["latency_s"] for r in results if r["first_s"] is not None)
    assert (told["first_content_s"] is None) == (streamed == 0)
    assert told["latency_s"]["p50"] <= told["latency_s"]["p99"]
    assert engine.prompts


async def test_a_conversation_by_response_ids_is_replayed_to_another_gateway(
    served: tuple[Gateway, ToldEngine, str, str], fmt: TemplateFormat, tmp_path: Path
) -> None:
    """The calls that a recorded result answers are none of those that the other server's answers make."""
    _, engine, url, key = served
    tools = [{"type": "function", "name": "exec", "parameters": {"type": "object"}, "strict": False}]
    told = ToldEngine(fmt, lambda prompt, number: call_text("exec", {"command": "ls"}) if not number else "Done.")
    lines: list[Any] = []
    body: dict[str, Any] = {"model": "m", "input": "go", "tools": tools}
    async with Gateway(told.policy()) as recorded, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {recorded.open('recorded').api_key}"}
        where = f"http://127.0.0.1:{await recorded.serve()}/v1/responses"
        for _ in range(3):
            async with http.post(where, json=body, headers=headers) as reply:
                response = await reply.json()
                assert reply.status == 200, response
            lines.append({"body": body, "response": response})
            calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
            items = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls]
            body = {**body, "input": items or "on", "previous_response_id": response["id"]}
    file = write_lines(tmp_path / "r.jsonl", lines)
    status, found, said = await invoke(str(file), "--base-url", url, "--api-key", key)
    assert (status, found["ok"]) == (0, 3), said
    assert sorted(engine.prompts) == sorted(told.prompts)


async def test_a_conversation_goes_on_at_the_server_that_gave_its_ids(
    served: tuple[Gateway, ToldEngine, str, str], tmp_path: Path
) -> None:
    _, engine, url, key = served
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/v1/responses", json={"model": "m", "input": "go"}, headers=headers) as reply:
            first = (await reply.json())["id"]
    line = {"model": "m", "input": "on", "previous_response_id": first}
    file = write_lines(tmp_path / "r.jsonl", [line, {**line, "previous_response_id": "resp_none"}])
    argv = (str(file), "--base-url", url, "--api-key", key, "--keep-response-ids")
    status, found, said = await invoke(*argv)
    assert (status, found["ok"], found["failed"]) == (1, 1, 1), said
    begun, went_on = engine.prompts
    assert went_on[: len(begun)] == begun
    with pytest.raises(ConfigError, match="--keep-response-ids"):
        await invoke(*argv[:-1])


async def test_refusals_are_counted_and_end_with_status_1(
    served: tuple[Gateway, ToldEngine, str, str], tmp_path: Path
) -> None:
    _, _, url, _ = served
    file = write_lines(tmp_path / "r.jsonl", [body for _, body in REQUESTS])
    status, told, _ = await invoke(str(file), "--base-url", url, "--api-key", "wrong", "--max-requests", "4")
    assert (status, told["requests"], told["failed"], told["repeated"]) == (1, 4, 4, 0)
    assert all(error.startswith("401: ") for error in told["errors"])


# -- a server that fails ---------------------------------------------------------------------------------------------

WHOLE = {
    "id": "x",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


class Flaky:
    """Fails each request in the ways its model names, one after another, and then answers it."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.models: list[str] = []
        self.times: list[float] = []
        self.hanging = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.headers.append(dict(request.headers))
        self.models.append(body["model"])
        self.times.append(asyncio.get_running_loop().time())
        ways = body["user"].split(",")
        way = ways[self.tries[body["user"]]] if self.tries[body["user"]] < len(ways) else "fine"
        self.tries[body["user"]] += 1
        if way == "hang":
            self.hanging.set()
            await asyncio.sleep(30)
        if way == "drop":
            assert request.transport is not None
            request.transport.abort()
        if way.isdigit():
            headers = {"retry-after": "0.3"} if way == "429" else {}
            return web.json_response({"error": {"message": f"sorry {way}"}}, status=int(way), headers=headers)
        if way == "html":
            return web.Response(text="<html>")
        if not body.get("stream"):
            return web.json_response(WHOLE)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        await asyncio.sleep(0.05)
        piece = {"choices": [{"index": 0, "delta": {"content": "é" * 3000}}]}
        data = f"data: {json.dumps(piece, ensure_ascii=False)}\r\n\r\n".encode()
        await response.write(data[:2000])
        await asyncio.sleep(0.02)
        await response.write(data[2000:])
        if way == "error":
            await response.write(b'data: {"error": {"message": "overloaded"}}\n\n')
        if way in ("cut", "error"):
            return response
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": WHOLE["usage"]}
        await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]".encode())
        return response


@pytest.fixture
async def flaky() -> AsyncIterator[tuple[Flaky, str]]:
    told = Flaky()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", told.chat)
    async with TestServer(application) as server:
        yield told, str(server.make_url("")).rstrip("/")


async def test_failures_that_may_pass_are_tried_again_and_the_others_not(
    flaky: tuple[Flaky, str], tmp_path: Path
) -> None:
    server, url = flaky
    ways = ["fine", "503,503", "drop", "429", "cut", "error", "400", "500,500,500", "html"]
    lines = [{"model": "m", "user": way, "messages": USER, "stream": way in ("cut", "error", "fine")} for way in ways]
    out = tmp_path / "out.jsonl"
    argv = [str(write_lines(tmp_path / "r.jsonl", lines)), "--base-url", url, "--retries", "2", "--out", str(out)]
    status, told, _ = await invoke(*argv, "--header", "X-Who: me", "--model", "other", "-j", "9")
    assert status == 1
    results = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda r: r["number"])
    by_way = dict(zip(ways, results, strict=True))
    assert {way: r["tries"] for way, r in by_way.items()} == {
        **dict.fromkeys(("drop", "429", "cut", "error"), 2),
        **dict.fromkeys(("fine", "400", "html"), 1),
        **dict.fromkeys(("503,503", "500,500,500"), 3),
    }
    assert {way for way, r in by_way.items() if not r["ok"]} == {"400", "500,500,500", "html"}
    assert by_way["400"]["error"] == "400: sorry 400"
    assert (told["ok"], told["failed"], told["repeated"]) == (6, 3, 6)
    assert set(server.models) == {"other"}
    assert all(h["X-Who"] == "me" for h in server.headers)
    fine = by_way["fine"]
    assert (fine["input_tokens"], fine["output_tokens"], fine["finish"]) == (3, 2, "stop")
    assert 0.05 <= fine["first_s"] <= fine["latency_s"]


async def test_a_server_that_hangs_or_is_not_there(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "user": "hang", "messages": USER}])
    status, told, _ = await invoke(str(file), "--base-url", flaky[1], "--retries", "1", "--timeout", "0.3")
    assert (status, told["ok"], told["repeated"]) == (0, 1, 1)
    status, told, _ = await invoke(str(file), "--base-url", "http://127.0.0.1:9", "--retries", "0")
    assert status == 1
    assert next(iter(told["errors"])).startswith("nobody answers at http://127.0.0.1:9 (")


ODD = [
    "",
    "null",
    "[1]",
    "[" * 100_000,
    '"\xff"',
    '{"choices": "x"}',
    '{"choices": ["x"]}',
    '{"choices": [{"finish_reason": "stop", "message": "x"}]}',
    '{"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": "many"}}',
    '{"error": {"message": {"a": 1}}}',
    '{"candidates": [{"finishReason": "STOP", "content": []}]}',
    '{"type": "message", "stop_reason": "end_turn", "usage": 7}',
    '{"status": ["completed"]}',
]
"""Answers that no protocol has."""


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_of_another_shape_is_one_failure_and_no_more(streamed: bool, tmp_path: Path) -> None:
    async def odd(request: web.Request) -> web.Response:
        said = json.loads(await request.read())["say"].encode("latin-1")
        if streamed:
            return web.Response(body=b"data: " + said + b"\n\n", headers={"Content-Type": "text/event-stream"})
        return web.Response(body=said, content_type="application/json")

    bodies = [{"messages": []}, {"input": "x"}, {"messages": [], "system": "s"}, {"contents": []}]
    lines = [{"model": "m", "say": say, **body} for say in ODD for body in bodies]
    good = {"choices": [{"finish_reason": "stop", "delta": {"content": "x"}}]}
    lines.append({"model": "m", "say": json.dumps(good), "messages": []})
    application = web.Application()
    application.router.add_post("/{path:.*}", odd)
    async with TestServer(application) as server:
        url = str(server.make_url("")).rstrip("/")
        file = write_lines(tmp_path / "r.jsonl", lines)
        status, told, _ = await invoke(str(file), "--base-url", url, "--retries", "0")
    assert (status, told["requests"], told["ok"]) == (1, len(lines), 1)


async def test_a_redirect_is_told_and_takes_the_key_nowhere(tmp_path: Path) -> None:
    seen: list[str] = []

    async def moved(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", moved)
    async with TestServer(application) as server:
        file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "messages": []}])
        status, told, _ = await invoke(str(file), "--base-url", str(server.make_url("")))
    assert (status, list(told["errors"])) == (1, ["307: it has moved to /elsewhere: give that address"])
    assert seen == ["/v1/chat/completions"]


def test_a_server_asks_to_wait_in_any_spelling() -> None:
    assert _asked_wait({"retry-after": "3"}) == 3
    assert _asked_wait({"retry-after-ms": "1500", "retry-after": "2"}) == 1.5
    soon = _asked_wait({"retry-after": formatdate(time.time() + 60, usegmt=True)})
    assert soon is not None
    assert 30 < soon <= 60
    assert _asked_wait({"retry-after": formatdate(0, usegmt=True)}) == 0
    assert _asked_wait({"retry-after": "soon"}) is None
    assert _asked_wait({}) is None


async def test_a_given_header_wins_however_it_is_written(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    server, url = flaky
    file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "user": "fine", "messages": USER}])
    argv = (str(file), "--base-url", url, "--api-key", "k", "--header", "authorization: mine")
    assert (await invoke(*argv))[0] == 0
    assert [value for name, value in server.headers[0].items() if name.lower() == "authorization"] == ["mine"]


async def test_interrupted_it_tells_what_was_answered(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    server, url = flaky
    lines = [{"model": "m", "user": way, "messages": USER} for way in ("fine", "hang", "fine")]
    out = tmp_path / "out.jsonl"
    argv = ["replay", str(write_lines(tmp_path / "r.jsonl", lines)), "--base-url", url, "-j", "1", "--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sandlot.cli", *argv, "--json", stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(60):
        await server.hanging.wait()
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
    assert process.returncode == 130
    assert json.loads(stdout)["ok"] == 1
    assert b"interrupted" in stderr
    assert b"Traceback" not in stderr
    assert [json.loads(line)["ok"] for line in out.read_text().splitlines()] == [True]


async def test_more_requests_at_once_than_files_may_be_open_at_first(tmp_path: Path) -> None:
    """The soft bound is raised: shells give 1,024 or less."""
    count = 150
    together = asyncio.Barrier(count)

    async def chat(request: web.Request) -> web.Response:
        await together.wait()
        return web.json_response(WHOLE)

    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    async with TestServer(application) as server:
        file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "messages": USER}] * count)
        command = [sys.executable, "-m", "sandlot.cli", "replay", str(file), "--base-url", str(server.make_url(""))]
        limited = [
            "sh",
            "-c",
            'ulimit -Sn 100; exec "$@"',
            "sh",
            *command,
            "--retries",
            "0",
            "-j",
            str(count),
            "--json",
        ]
        process = await asyncio.create_subprocess_exec(*limited, stdout=PIPE)
        stdout, _ = await asyncio.wait_for(process.communicate(), 60)
    assert json.loads(stdout)["ok"] == count


async def test_a_full_disk_is_no_riddle(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "user": "fine", "messages": USER}])
    with pytest.raises(OSError) as refused:
        await invoke(str(file), "--base-url", flaky[1], "--out", "/dev/full")
    assert "free some space" in told_of(refused.value)


async def test_a_gzipped_file_is_read_and_a_damaged_one_refused(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    lines = [{"model": "m", "user": "fine", "messages": USER}] * 3
    packed = gzip.compress(write_lines(tmp_path / "r.jsonl", lines).read_bytes())
    (tmp_path / "whole.gz").write_bytes(packed)
    (tmp_path / "cut.gz").write_bytes(packed[:-12])
    status, told, _ = await invoke(str(tmp_path / "whole.gz"), "--base-url", flaky[1])
    assert (status, told["ok"]) == (0, 3)
    with pytest.raises(ConfigError, match=r"cut\.gz is damaged"):
        await invoke(str(tmp_path / "cut.gz"), "--base-url", flaky[1])


def test_results_never_take_the_place_of_the_requests(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "messages": USER}])
    before = file.read_bytes()
    kept = tmp_path / "kept.jsonl"
    kept.write_text("earlier results")
    for out, argv in ((file, []), (kept, ["--base-url", "nowhere"]), (kept, ["--engine", "http://h"])):
        argv = ["replay", str(file), "--base-url", "http://h", "--out", str(out), *argv]
        assert isinstance(CliRunner().invoke(app, argv).exception, ConfigError)
    assert (file.read_bytes(), kept.read_text()) == (before, "earlier results")


async def test_the_waiting_time_that_a_server_asks_for_is_kept(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    server, url = flaky
    file = write_lines(tmp_path / "r.jsonl", [{"model": "m", "user": "429", "messages": USER}])
    status, _, _ = await invoke(str(file), "--base-url", url)
    assert status == 0
    assert 0.29 <= server.times[1] - server.times[0] < 3


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    file = str(write_lines(tmp_path / "r.jsonl", [{"model": "m", "messages": USER}]))
    google = str(write_lines(tmp_path / "g.jsonl", [{"contents": []}]))
    for argv, says in (
        ([], "either a FILE"),
        ([file, "--run", str(tmp_path)], "either a FILE"),
        ([file], "--base-url"),
        (["--run", str(tmp_path)], "--engine"),
        (["--run", str(tmp_path), "--engine", "http://127.0.0.1:9"], "no run directory"),
        ([file, "--base-url", "h:80"], "--base-url"),
        ([file, "--base-url", "http://["], "--base-url"),
        ([file, "--base-url", "http://h", "--engine", "http://e"], "--engine has no meaning"),
        (["--run", str(tmp_path), "--engine", "http://e", "--no-stream"], "has no meaning with --run"),
        ([file, "--base-url", "http://h", "--header", "nope"], "'Name: value'"),
        ([file, "--base-url", "http://h", "--header", "A: b\nC: d"], "control character"),
        ([google, "--base-url", "http://h"], "--model"),
        ([str(tmp_path / "none"), "--base-url", "http://h"], "there is no file"),
    ):
        result = CliRunner().invoke(app, ["replay", *argv])
        assert isinstance(result.exception, ConfigError), argv
        assert says in str(result.exception)


# -- a run's own prompts ---------------------------------------------------------------------------------------------


async def test_the_prompts_of_a_run_are_asked_again_at_an_engine(fmt: TemplateFormat, tmp_path: Path) -> None:
    import aiohttp

    from sandlot.rollout.serve import recorders

    model = make_toy_model(tmp_path / "toy")
    told = ToldEngine(fmt, lambda prompt, number: f"reply {number}")
    with RunDir.create_or_continue(tmp_path / "run", {"k": 1}) as run:
        async with Gateway(told.policy(), recorder=recorders(run)) as gateway, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{await gateway.serve()}"
            for name in ("one", "two"):
                opened = gateway.open(name)
                history: list[dict[str, Any]] = []
                for turn in range(3):
                    history.append({"role": "user", "content": f"question {turn} of {name}"})
                    body = {"model": "toy", "max_tokens": 12, "messages": history}
                    headers = {"x-api-key": opened.api_key}
                    async with http.post(f"{url}/v1/messages", json=body, headers=headers) as reply:
                        answer = await reply.json()
                    history.append({"role": "assistant", "content": answer["content"]})
                await gateway.finish(name, reward=1.0)
    turns = [t for name in ("one", "two") for t in read_journal(run.journal_path(name)).turns]
    assert [t.parent is not None for t in turns] == [False, True, True] * 2
    async with engines.embedded(model, max_context=4096) as engine:
        out = tmp_path / "out.jsonl"
        argv = ["--run", str(run.path), "--engine", engine, "--out", str(out), "-j", "4"]
        status, found, said = await invoke(*argv)
        assert (status, found["requests"], found["ok"], found["kinds"]) == (0, 6, 6, {"tokens": 6}), said
        results = {r["name"]: r for r in map(json.loads, out.read_text().splitlines())}
        expected = {
            f"{name}#{k}": turns[3 * n + k].prompt_length for n, name in enumerate(("one", "two")) for k in range(3)
        }
        assert {name: r["input_tokens"] for name, r in results.items()} == expected
        assert all(0 < r["output_tokens"] <= 12 for r in results.values())
        status, found, _ = await invoke(*argv, "--repeat", "2", "--max-requests", "8")
        assert (status, found["requests"]) == (0, 8)
