"""`sandlot gateway --workers`: sessions spread over processes behind one port, and what becomes of them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from sandlot.engine.process import EngineProcess
from sandlot.engine.replicas import placed
from sandlot.gateway.keys import worker_named
from sandlot.rollout.proof import audit_run
from sandlot.trajectory.rundir import RunDir
from support.gateway_process import Served, gateway_process
from support.toy_model import make_toy_model

SAID = "The work is done."
SAY_IT: Any = [{"role": "user", "content": "Say it."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with gateway_process(tmp_path_factory.mktemp("workers"), model, workers=2) as served:
        yield served


def until(what: Callable[[], Any], seconds: float = 90) -> Any:
    """The first true value of `what`."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)
    return value


def worker_of(key: str) -> int:
    number = worker_named(key.encode())
    assert number is not None
    return number


def one_session_on_each(served: Served) -> tuple[tuple[str, str], tuple[str, str]]:
    """(session id, key) at worker 0 and at worker 1."""
    found: dict[int, tuple[str, str]] = {}
    while len(found) < 2:
        session_id, key = served.open()
        found[worker_of(key)] = (session_id, key)
    return found[0], found[1]


def ask(served: Served, key: str, http: httpx.Client | None = None, text: str = "Say it.") -> httpx.Response:
    body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": text}]}
    return (http or httpx).post(f"{served.base_url}/v1/messages", json=body, headers={"x-api-key": key}, timeout=60)


def state(served: Served, session_id: str) -> dict[str, Any]:
    found: dict[str, Any] = served.control("GET", f"/control/sessions/{session_id}").json()
    return found


def metric(served: Served, name: str) -> float:
    lines = served.control("GET", "/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def health(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{served.control_url}/healthz").json()
    return found


def children(served: Served) -> list[int]:
    """Processes that the gateway has started and that are still there."""
    return [
        int(pid) for pid in Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    ]


def worker_process(served: Served, number: int) -> int:
    def argv(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")

    return next(p for p in children(served) if argv(p)[-2:] == ["sandlot.rollout.gateway_worker", str(number)])


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody here waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def connect(served: Served) -> socket.socket:
    where = urlsplit(served.base_url)
    assert where.hostname is not None
    assert where.port is not None
    sock = socket.create_connection((where.hostname, where.port), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


BEGIN = b"POST /v1/messages HTTP/1.1\r\nHost: h\r\n"
"""How a request begins; `rest` follows."""


def rest(key: str) -> bytes:
    body = json.dumps({"model": "m", "max_tokens": 50, "messages": SAY_IT}).encode()
    return f"Content-Length: {len(body)}\r\nx-api-key: {key}\r\n\r\n".encode() + body


def answer_to(sock: socket.socket) -> bytes:
    """Status line and body of an answer with a length."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        got = sock.recv(65536)
        assert got, raw
        raw += got
    head, _, body = raw.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head.split(b"\r\n")[0] + body


def test_sessions_are_spread_evenly(served: Served) -> None:
    opened = [served.open() for _ in range(6)]
    numbers = [worker_of(key) for _, key in opened]
    assert sorted(numbers[:2]) == sorted(numbers[2:4]) == sorted(numbers[4:]) == [0, 1]
    for session_id, _ in opened:
        assert served.control("DELETE", f"/control/sessions/{session_id}").status_code == 204
    assert served.control("POST", "/control/sessions", {"session_id": opened[0][0]}).status_code == 201


def test_one_connection_serves_sessions_of_different_workers(served: Served) -> None:
    """A client whose pool several agents share sends the requests of all through the same kept-alive connection."""
    (first, first_key), (second, second_key) = one_session_on_each(served)
    with anthropic.Anthropic(base_url=served.base_url, api_key=first_key, max_retries=0) as one:
        other = one.copy(api_key=second_key, base_url=f"{served.base_url}/s/{second}")
        histories: dict[anthropic.Anthropic, Any] = {one: [*SAY_IT], other: [*SAY_IT]}
        for turn in range(3):
            for client, messages in histories.items():
                with client.messages.stream(model="m", max_tokens=50, messages=messages) as stream:
                    said = stream.get_final_message().content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"more {turn}"}]
        assert len(one._client._transport._pool.connections) == 1  # type: ignore[attr-defined]
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key=second_key, max_retries=0) as one_openai:
        for key in (second_key, first_key):
            plain = one_openai.copy(api_key=key).chat.completions.create(model="m", messages=SAY_IT)
            assert plain.choices[0].message.content == SAID
            with pytest.raises(openai.BadRequestError):
                one_openai.copy(api_key=key).chat.completions.create(model="m", messages=[])
        assert len(one_openai._client._transport._pool.connections) == 1  # type: ignore[attr-defined]
    for session_id in (first, second):
        assert state(served, session_id)["turns"] == 4
        finished = served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 0.5}).json()
        assert finished["audit"]["violations"] == []
        assert finished["audit"]["trained"] == finished["audit"]["sampled"] > 0
        assert len(finished["samples"]) == 2  # the conversation, and the question that stood alone


def test_what_is_passed_on_arrives_as_it_was_sent(served: Served) -> None:
    (first, first_key), (second, second_key) = one_session_on_each(served)
    contents = {"contents": [{"role": "user", "parts": [{"text": "Say it."}]}], "labels": {"long": "x" * 2_000_000}}
    with httpx.Client(timeout=60) as http:
        for key in (first_key, second_key):  # one of them is passed on: path, query, long body, answer in pieces
            url = f"{served.base_url}/v1beta/models/org%2Fmodel:streamGenerateContent?alt=sse&key={key}"
            with http.stream("POST", url, json=contents) as reply:
                assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream")
                assert SAID in reply.read().decode()
            assert (
                http.get(f"{served.base_url}/v1/nothing%20here?key={key}").json()["error"]["message"].count("nothing")
            )
            upgrade = {"x-api-key": key, "Upgrade": "websocket"}
            assert http.get(f"{served.base_url}/v1/responses", headers=upgrade).status_code == 426
            assert http.head(f"{served.base_url}/", headers={"x-api-key": key}).content == b""
            packed = gzip.compress(json.dumps({"messages": SAY_IT}).encode())
            headers = {"x-api-key": key, "Content-Encoding": "gzip"}
            reply = http.post(f"{served.base_url}/v1/messages", content=packed, headers=headers)
            assert reply.status_code == 200, reply.text
    assert state(served, first)["prompt_tokens"] == state(served, second)["prompt_tokens"] > 0


def test_a_client_that_leaves_is_noticed_by_the_worker_behind_another_one(served: Served) -> None:
    (_, first_key), (second, second_key) = one_session_on_each(served)
    served.control("POST", "/control/pause")
    with connect(served) as sock:
        sock.sendall(f"GET /v1/models HTTP/1.1\r\nHost: h\r\nx-api-key: {first_key}\r\n\r\n".encode())
        assert b"200" in answer_to(sock)[:20]
        sock.sendall(BEGIN + rest(second_key))
        until(lambda: metric(served, "sandlot_calls_sampling") == 1)
    until(lambda: state(served, second)["abandoned"] == 1)
    served.control("POST", "/control/resume")
    assert (state(served, second)["turns"], metric(served, "sandlot_calls_sampling")) == (0, 0)


def test_keys_open_their_own_session_only(served: Served) -> None:
    (first, first_key), (second, second_key) = one_session_on_each(served)
    with httpx.Client() as http:  # one connection, whose worker has one of the sessions
        for key, path in ((first_key, second), (second_key, first)):
            reply = http.post(f"{served.base_url}/s/{path}/v1/messages", json={}, headers={"x-api-key": key})
            assert reply.status_code == 401
        for number in (0, 1, 7):
            for secret in ("", first_key.split("-", 3)[3], second_key.split("-", 3)[3]):
                key = f"sk-sandlot-w{number}-{secret}"
                expected = 200 if key in (first_key, second_key) else 401
                assert ask(served, key, http).status_code == expected, key
        assert ask(served, "", http).status_code == 401
    assert state(served, first)["turns"] == state(served, second)["turns"] == 1


def test_heads_may_come_in_pieces_late_or_never(served: Served) -> None:
    (_, first_key), (_, second_key) = one_session_on_each(served)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(served)) for _ in range(100)]
        late = [stack.enter_context(connect(served)) for _ in range(4)]
        for k, sock in enumerate([*silent, *late]):
            sock.sendall(BEGIN if sock in late else BEGIN[: k % len(BEGIN)])
        for key in (first_key, second_key):
            with connect(served) as sock:
                raw = BEGIN + rest(key)
                for at in range(0, len(raw), 40):
                    sock.sendall(raw[at : at + 40])
                    time.sleep(0.005)
                assert SAID.encode() in answer_to(sock)
        time.sleep(1.2)  # by now the late ones stand at whatever worker
        for sock, key in zip(late, (first_key, first_key, second_key, second_key), strict=True):
            sock.sendall(rest(key))
            assert SAID.encode() in answer_to(sock)
    with connect(served) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP at all\r\n\r\n")
        assert b"400" in sock.recv(4096).split(b"\r\n")[0]
    with connect(served) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 30_000 + b"\r\n\r\n")
        assert b"400" in sock.recv(4096).split(b"\r\n")[0]


def in_background(pool: ThreadPoolExecutor, served: Served, *keys: str) -> list[Future[httpx.Response]]:
    return [pool.submit(ask, served, key, None, f"call {n}") for n, key in enumerate(keys)]


def test_a_pause_holds_the_calls_of_all_workers(served: Served) -> None:
    (first, first_key), (second, second_key) = one_session_on_each(served)
    assert served.control("POST", "/control/pause", {"mode": "abort"}).json() == {"paused": True}
    assert health(served) == {**health(served), "status": "ok", "paused": True, "workers": 2}
    with ThreadPoolExecutor() as pool:
        calls = in_background(pool, served, first_key, second_key)
        until(lambda: metric(served, "sandlot_calls_sampling") == 2)
        assert not any(call.done() for call in calls)
        resumed = served.control("POST", "/control/resume", {"weight_version": "v7"}).json()
        assert resumed == {"paused": False, "weight_version": "v7"}
        assert [call.result().status_code for call in calls] == [200, 200]
    assert served.control("POST", "/control/pause", {"mode": "now"}).status_code == 400
    assert health(served)["paused"] is False
    assert state(served, first)["turns"] == state(served, second)["turns"] == 1


def test_a_worker_that_dies_takes_only_its_own_sessions_and_is_replaced(served: Served) -> None:
    (lost, lost_key), (kept, kept_key) = one_session_on_each(served)
    assert ask(served, lost_key).status_code == ask(served, kept_key).status_code == 200
    turns = metric(served, "sandlot_turns_total")
    served.control("POST", "/control/pause")
    with ThreadPoolExecutor() as pool:
        dying, living = in_background(pool, served, lost_key, kept_key)
        until(lambda: metric(served, "sandlot_calls_sampling") == 2)
        os.kill(worker_process(served, 0), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            dying.result()
        until(lambda: served.control("GET", f"/control/sessions/{lost}").status_code == 410)
        until(lambda: health(served)["workers"] == 2)
        new, new_key = one_session_on_each(served)[0]
        held = pool.submit(ask, served, new_key)  # the new process is paused like the others
        until(lambda: metric(served, "sandlot_calls_sampling") == 2)
        assert not living.done()
        assert not held.done()
        served.control("POST", "/control/resume", {"weight_version": "v8"})
        assert living.result().status_code == held.result().status_code == 200
    assert metric(served, "sandlot_turns_total") == turns + 2

    told = ask(served, lost_key)
    assert told.status_code == 403
    assert "lost" in told.json()["error"]["message"]
    assert told.headers["x-should-retry"] == "false"
    for method, path in (("GET", ""), ("POST", "/finish")):
        reply = served.control(method, f"/control/sessions/{lost}{path}", {} if method == "POST" else None)
        assert reply.status_code == 410
        assert "SIGKILL" in reply.json()["error"]
    assert served.open(session_id=lost)[0] == lost  # the episode begins again; what the first attempt left is set aside
    aside = RunDir.read(served.run).journal_path(lost)
    assert aside.exists()
    assert aside.with_name(f"{lost}.1.aborted.jsonl.gz").exists()
    for session_id in (kept, new):
        finished = served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 1.0}).json()
        assert finished["audit"]["violations"] == []
    run = RunDir.read(served.run)
    assert {kept, new} <= {row["episode_id"] for row in run.results()}
    assert audit_run(run).violations == []


def test_a_worker_that_hangs_is_replaced_like_one_that_died(model: Path, tmp_path: Path) -> None:
    limit = ("--heartbeat-timeout", "2")
    with gateway_process(tmp_path, model, workers=2, more=limit) as served, ThreadPoolExecutor() as pool:
        (lost, lost_key), (kept, kept_key) = one_session_on_each(served)
        hung, working = worker_process(served, 0), worker_process(served, 1)
        for pid in (served.process.pid, hung, working):  # a machine that sleeps: who listens hears nothing either
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.2)
        for pid in (served.process.pid, hung, working):
            os.kill(pid, signal.SIGCONT)
        assert ask(served, lost_key).status_code == ask(served, kept_key).status_code == 200
        os.kill(hung, signal.SIGSTOP)
        (waiting,) = in_background(pool, served, lost_key)
        with pytest.raises(httpx.TransportError):
            waiting.result()
        until(lambda: gone(hung))
        until(lambda: health(served)["workers"] == 2)
        told = served.control("GET", f"/control/sessions/{lost}")
        assert (told.status_code, "its event loop stood still for 2 s" in told.json()["error"]) == (410, True)
        assert ask(served, lost_key).status_code == 403
        assert [state(served, kept)["turns"], ask(served, kept_key).status_code] == [1, 200]
        (_, new_key), _ = one_session_on_each(served)
        assert ask(served, new_key).status_code == 200
        assert not gone(working)


def test_nothing_is_left_when_the_parent_is_killed(model: Path, tmp_path: Path) -> None:
    with gateway_process(tmp_path, model, workers=2) as served:
        (first, first_key), (second, second_key) = one_session_on_each(served)
        assert ask(served, first_key).status_code == ask(served, second_key).status_code == 200
        served.control("POST", f"/control/sessions/{second}/finish", {"reward": 1.0})
        started = children(served)
        assert len(started) == 3  # two workers and the engine
        served.process.kill()
        until(lambda: all(gone(pid) for pid in started))
        until(lambda: not list(served.temporary.glob("sandlot-gateway-*")))
    config = RunDir.read(tmp_path / "run").config
    with RunDir.create_or_continue(tmp_path / "run", config) as run:  # nobody has it any more
        assert [row["episode_id"] for row in run.results()] == [second]
        assert run.episode_ids() == sorted([first, second])


def test_a_gateway_that_does_not_start_says_why(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandlot.cli", "gateway", "--engine", "http://127.0.0.1:9", "--model", str(model)]
    command += ["--control-port", "0", "--workers", "2", "--port"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, cause in ((0, "127.0.0.1:9"), (taken.getsockname()[1], "cannot be served")):
            ended = subprocess.run([*command, str(port)], capture_output=True, text=True, timeout=120, env=env)
            assert ended.returncode == 1
            (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
            assert cause in error
            assert "Traceback" not in ended.stderr
            assert not list(tmp_path.iterdir())


async def test_a_replica_that_does_not_serve_is_told_by_all_workers(model: Path, tmp_path: Path) -> None:
    async with EngineProcess(model, threads=1) as goes, EngineProcess(model, threads=1) as stays:
        with gateway_process(tmp_path, model, engine=f"{goes.url},{stays.url}", workers=2) as served:
            assert health(served) == {"status": "ok", "sessions": 0, "paused": False, "engines_out": {}, "workers": 2}
            state = f'sandlot_engines{{engine="{goes.url}",state="%s"}}'
            assert metric(served, state % "serving") == 2
            await goes.stop()
            found: set[int] = set()  # workers that have found it down
            for number in range(200):
                session_id = f"s{number}"
                if placed(session_id, [goes.url, stays.url])[0] == goes.url:
                    _, key = served.open(session_id=session_id)
                    assert ask(served, key).status_code == 200
                    found.add(worker_of(key))
                if found == {0, 1}:
                    break
            told = health(served)
            assert (told["status"], told["engines_out"]) == ("degraded", {goes.url: "it does not answer"})
            assert metric(served, state % "down") == 2


@pytest.mark.slow
async def test_streams_of_all_workers_are_cut_off_by_a_pause_and_go_on_as_one_turn(model: Path, tmp_path: Path) -> None:
    long = {"top_k": 1, "max_tokens": 700}  # the toy model's likeliest tokens go round in a circle
    async with EngineProcess(model, threads=1) as engine:
        with gateway_process(tmp_path, model, engine=engine.url, workers=2) as served, ThreadPoolExecutor() as pool:
            sessions = dict(served.open(sampling=long) for _ in range(4))
            assert Counter(map(worker_of, sessions.values())) == {0: 2, 1: 2}

            def stream(key: str) -> str:
                body = {"model": "m", "max_tokens": 1000, "messages": SAY_IT, "stream": True}
                url, headers = f"{served.base_url}/v1/messages", {"x-api-key": key}
                return httpx.post(url, json=body, headers=headers, timeout=120).text

            def running() -> float:
                return float(httpx.get(f"{engine.url}/metrics").text.split()[-1])

            calls = [pool.submit(stream, key) for key in sessions.values()]
            until(lambda: running() == 4)
            assert served.control("POST", "/control/pause", {"mode": "abort"}).json() == {"paused": True}
            assert running() == 0
            assert not any(call.done() for call in calls)
            served.control("POST", "/control/resume", {"weight_version": "7"})
            assert all("event: message_stop" in call.result() for call in calls)
            for session_id in sessions:
                finished = served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 1.0}).json()
                assert finished["audit"]["violations"] == []
                assert [sum(sample["loss_mask"]) for sample in finished["samples"]] == [700]
