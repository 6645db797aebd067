"""The control side: sessions finished and deleted by several at once, by clients that leave, on disks that fill up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from aiohttp.streams import EmptyStreamReader
from aiohttp.test_utils import make_mocked_request

from sandlot.engine import Engine, SamplingParams
from sandlot.engine.replicas import ReplicatedEngine
from sandlot.errors import ConfigError, JournalError
from sandlot.gateway import Gateway, front_control
from sandlot.gateway.control import control_app, json_answer, prometheus
from sandlot.gateway.relay import client_of
from sandlot.gateway.worker import WorkerServer
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.samples import linearize
from sandlot.trajectory.store import to_json
from support.rig import Kept, MakeRig, Rig, ask

ADMIN = {"Authorization": "Bearer admin"}


@dataclass
class Failing(Kept):
    """A recorder whose first seals fail."""

    failing: int = 1

    def sealed(self, detail: Mapping[str, Any]) -> None:
        if self.failing:
            self.failing -= 1
            raise JournalError("the disk is full")
        super().sealed(detail)


class Held:
    """Linearizing that begins, and goes on when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def held(*args: Any, **options: Any) -> Any:
            loop.call_soon_threadsafe(self.begun.set)
            assert self.go.wait(30)
            return linearize(*args, **options)

        monkeypatch.setattr("sandlot.gateway.gateway.linearize", held)


class Control:
    def __init__(self, rig: Rig, port: int) -> None:
        self.rig, self.url = rig, f"http://127.0.0.1:{port}"

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        sent = ADMIN | headers
        async with self.rig.http.request(method, f"{self.url}{path}", json=body, headers=sent) as reply:
            return reply.status, await reply.json() if reply.content_type == "application/json" else None

    async def metric(self, name: str) -> float:
        async with self.rig.http.get(f"{self.url}/metrics", headers=ADMIN) as reply:
            return next(float(line.split()[1]) for line in (await reply.text()).splitlines() if line.startswith(name))


async def control(rig: Rig) -> Control:
    return Control(rig, await rig.gateway.serve_app(control_app(rig.gateway, "admin", rig.url), "127.0.0.1", 0))


async def one_turn(rig: Rig, key: str, text: str = "hi") -> None:
    async with rig.http.post(f"{rig.url}/v1/messages", json=ask(text), headers={"x-api-key": key}) as reply:
        assert reply.status == 200, await reply.text()


async def test_a_finish_goes_on_when_its_client_leaves(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await make_rig()
    told, kept, held = await control(rig), Kept(), Held(monkeypatch)
    opened = rig.gateway.open("e", recorder=kept)
    await one_turn(rig, opened.api_key)
    leaving = asyncio.ensure_future(told("POST", "/control/sessions/e/finish", {"reward": 1.0}))
    await held.begun.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    again = [asyncio.ensure_future(told("POST", "/control/sessions/e/finish", {"reward": 0.0})) for _ in range(2)]
    held.go.set()
    for status, finished in await asyncio.gather(*again):
        assert (status, [s["reward"] for s in finished["samples"]]) == (200, [1.0])
    assert [seal["reward"] for seal in kept.seals] == [1.0]


async def test_samples_are_told_off_the_event_loop(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session with thirty branches of a long history has a hundred megabytes of them."""
    rig = await make_rig()
    told, here, threads = await control(rig), threading.get_ident(), set[int]()
    encode = to_json

    def noted(sample: Sample) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return encode(sample)

    monkeypatch.setattr("sandlot.gateway.control.to_json", noted)
    opened = rig.gateway.open("e")
    for text in ("one", "two"):
        await one_turn(rig, opened.api_key, text)
    status, finished = await told("POST", "/control/sessions/e/finish", {"reward": 1.0})
    assert (status, len(finished["samples"]), finished["samples"][1]["reward"]) == (200, 2, 1.0)
    assert threads
    assert here not in threads


async def test_a_finish_that_could_not_be_recorded_can_be_asked_for_again(make_rig: MakeRig) -> None:
    rig = await make_rig()
    told, kept = await control(rig), Failing()
    opened = rig.gateway.open("e", recorder=kept)
    await one_turn(rig, opened.api_key)
    assert await told("POST", "/control/sessions/e/finish", {}) == (409, {"error": "the disk is full"})
    status, finished = await told("POST", "/control/sessions/e/finish", {"reward": 0.5})
    assert (status, len(finished["samples"]), [s["reward"] for s in kept.seals]) == (200, 1, [0.5])


async def test_a_session_is_deleted_once_whoever_asks_for_it(make_rig: MakeRig) -> None:
    rig = await make_rig()
    told, kept = await control(rig), Kept()
    opened = rig.gateway.open("e", recorder=kept)
    await one_turn(rig, opened.api_key)
    turns = await told.metric("sandlot_turns_total")
    rig.engine.hold = True
    rig.engine.asked.clear()
    calling = asyncio.ensure_future(
        rig.http.post(f"{rig.url}/v1/messages", json=ask("wait"), headers={"x-api-key": opened.api_key})
    )
    await rig.engine.asked.wait()
    gone = await asyncio.gather(*(told("DELETE", "/control/sessions/e") for _ in range(3)))
    assert {status for status, _ in gone} <= {204, 404}
    assert 204 in [status for status, _ in gone]
    assert kept.closed == 1
    assert await told.metric("sandlot_turns_total") == turns
    assert (await calling).status == 403


async def test_what_is_deleted_while_it_finishes_leaves_nothing_to_the_next_of_its_name(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    told, kept, held = await control(rig), Kept(), Held(monkeypatch)
    opened = rig.gateway.open("e", recorder=kept)
    await one_turn(rig, opened.api_key)
    finishing = asyncio.ensure_future(told("POST", "/control/sessions/e/finish", {}))
    await held.begun.wait()
    deleting = asyncio.ensure_future(told("DELETE", "/control/sessions/e"))
    await asyncio.sleep(0)
    held.go.set()
    assert [(await finishing)[0], (await deleting)[0]] == [200, 204]
    assert (len(kept.seals), kept.closed) == (1, 1)
    assert (await told("POST", "/control/sessions", {"session_id": "e"}))[0] == 201
    assert (await told("POST", "/control/sessions/e/finish", {}))[1]["samples"] == []


async def test_sampling_whose_logprobs_the_engine_would_not_give_is_refused(make_rig: MakeRig) -> None:
    rig = await make_rig()
    told = await control(rig)
    rig.gateway.policy = replace(rig.gateway.policy, logprobs_mode="raw")
    for sampling in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}):
        status, answer = await told("POST", "/control/sessions", {"sampling": sampling})
        assert (status, "processed_logprobs" in answer["error"]) == (409, True)
    assert (await told("POST", "/control/sessions", {"sampling": {"max_tokens": 5}}))[0] == 201
    with pytest.raises(ConfigError, match="temperature 1 without truncation"):
        rig.gateway.open(sampling=SamplingParams(temperature=0.5))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "sessions", {"limit": {}}, 400, "there is no field 'limit'; there are: session_id, sampling, "),
        (
            "POST",
            "sessions",
            {"limits": {"turn": 2}},
            400,
            "there is no field 'limits.turn'; there are: turns, tokens, ",
        ),
        ("POST", "sessions", {"limits": {"turns": 0}}, 400, "limits.turns: input should be greater than 0 (got 0)"),
        ("POST", "sessions", [1], 400, "body: input should be a valid dictionary"),
        ("POST", "pause", {"mode": "now"}, 400, "mode: input should be 'drain' or 'abort' (got 'now')"),
        ("GET", "pause", None, 405, "/control/pause takes POST, not GET"),
        ("POST", "session", {}, 404, "there is no POST /control/session here"),
        ("POST", "sessions", {"metadata": {"big": "x" * 2_000_000}}, 413, "the body is larger than 1048576 bytes"),
    ],
)
async def test_a_call_that_cannot_be_answered_is_told_why(
    make_rig: MakeRig, method: str, path: str, body: Any, status: int, says: str
) -> None:
    rig = await make_rig()
    got, told = await (await control(rig))(method, f"/control/{path}", body)
    assert (got, told["error"][: len(says)]) == (status, says)


async def test_odd_keys_and_bodies_are_refused_like_any_other(make_rig: MakeRig) -> None:
    rig = await make_rig()
    told = await control(rig)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(told.url.rsplit(":", 1)[1]))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    for body, says in (
        (b'{"metadata":{"a":"\xff"}}', "no JSON"),
        (b'{"metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "nested too deeply"),
        (b'{"sampling":{"top_k":-7}}', "sampling.top_k"),
        (b'{"sampling":{"seed":36893488147419103232}}', "sampling.seed"),
    ):
        async with rig.http.post(f"{told.url}/control/sessions", data=body, headers=ADMIN) as reply:
            assert (reply.status, says in (await reply.json())["error"]) == (400, True)


@pytest.fixture
async def two_workers(tmp_path: Path) -> AsyncIterator[list[Any]]:
    """Workers that tell two turns each and open any session, while their `runs` is set."""
    workers: list[Any] = []
    runners = []
    for number in range(2):
        worker: Any = SimpleNamespace(number=number, up=asyncio.Event(), runs=asyncio.Event(), silent=False, opened=0)

        async def answer(request: web.Request, worker: Any = worker) -> web.Response:
            await worker.runs.wait()
            if request.path == "/metrics":
                return prometheus(b"# HELP t_total T.\n# TYPE t_total counter\nt_total 2.0\n")
            if request.path == "/healthz":
                return json_answer({"engines_out": {"http://a": "it does not answer"}})
            worker.opened += 1
            return json_answer({"api_key": "k"}, status=201)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.UnixSite(runners[-1], str(tmp_path / str(number))).start()
        worker.client = client_of(tmp_path / str(number))
        worker.up.set()
        worker.runs.set()
        workers.append(worker)
    yield workers
    for worker, runner in zip(workers, runners, strict=True):
        worker.runs.set()
        await worker.client.close()
        await runner.cleanup()


def front(workers: list[Any]) -> Any:
    return front_control.FrontControl(cast("Any", SimpleNamespace(up=workers, all=workers)), 99)


async def test_metrics_of_several_workers_do_not_wait_for_one_that_hangs(
    two_workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_control, "_SCRAPE_S", 0.2)
    told = front(two_workers)
    for _ in range(2):
        assert b"t_total 4.0" in (await told.metrics(None)).body
        two_workers[1].runs.clear()


async def test_how_it_is_is_told_without_a_worker_that_hangs(
    two_workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_control, "_HEALTH_S", 0.2)
    two_workers[1].runs.clear()
    told = msgspec.json.decode((await front(two_workers).health(None)).body)
    assert (told["status"], told["engines_out"]) == ("degraded", {"http://a": "it does not answer"})


async def test_sessions_are_opened_at_workers_that_give_signs_of_life(two_workers: list[Any]) -> None:
    told = front(two_workers)
    for silent, opened in ((None, [1, 1]), (0, [1, 3]), (1, [3, 3])):
        for number, worker in enumerate(two_workers):
            worker.silent = number == silent
        for _ in range(2):
            assert (await told.open(make_mocked_request("POST", "/", payload=EmptyStreamReader()))).status == 201
        assert [worker.opened for worker in two_workers] == opened


async def test_a_worker_that_ends_sends_nobody_to_another_one_in_vain(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = await make_rig()
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listening:
        worker = WorkerServer(rig.gateway, 0, 2, tmp_path, theirs, lambda: None)
        await worker.start("admin", rig.url, 60)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        with listening.accept()[0] as connection:
            socket.send_fds(ours, [b"."], [connection.fileno()])

        async def status(key: str) -> bytes:
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: h\r\nx-api-key: {key}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            return head.split()[1]

        async with asyncio.timeout(30):
            assert await status(rig.opened.api_key) == b"200"
            await worker.close()
            assert await status("sk-sandlot-w1-other") == b"503"
        writer.close()


async def test_replicas_that_do_not_serve_are_told_with_the_reason(make_rig: MakeRig) -> None:
    rig = await make_rig()

    async def examine(replica: Engine, other: Engine | None) -> None:
        raise ConfigError("its logprobs are raw")

    names = ["http://a", "http://b", "http://c"]
    engine = ReplicatedEngine(dict.fromkeys(names, rig.engine), recheck_s=0.01)
    engine.examine = examine
    async with Gateway(replace(rig.engine.policy(), engine=engine)) as gateway:
        url = f"http://127.0.0.1:{await gateway.serve_app(control_app(gateway, 'admin', ''), '127.0.0.1', 0)}"

        async def health() -> dict[str, Any]:
            async with rig.http.get(f"{url}/healthz") as reply:
                return cast("dict[str, Any]", await reply.json())

        assert await health() == {"status": "ok", "sessions": 0, "paused": False, "engines_out": {}}
        engine._lost("http://b")
        assert (await health())["engines_out"] == {"http://b": "it does not answer"}
        while not engine.refused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        told = await health()
        assert (told["status"], told["engines_out"]) == ("degraded", {"http://b": "its logprobs are raw"})
        async with rig.http.get(f"{url}/metrics", headers=ADMIN) as reply:
            lines = (await reply.text()).splitlines()
        states = [("a", "serving"), ("b", "refused"), ("c", "serving")]
        told_states = [line for line in lines if line.startswith("sandlot_engines{")]
        assert told_states == [
            f'sandlot_engines{{engine="http://{name}",state="{state}"}} 1.0' for name, state in states
        ]
    await engine.close()
