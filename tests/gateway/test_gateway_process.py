"""`sandlot gateway` as processes of its own: official SDKs on the agents' side, HTTP on the control side."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from sandlot.rollout.proof import audit_run
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir
from support.gateway_process import Served, gateway_process
from support.rig import BASH
from support.sessions import make_turn
from support.toy_model import make_toy_model

SAID = "The work is done."


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("gateway")
    with gateway_process(scratch, make_toy_model(scratch / "toy"), workers=request.param) as served:
        yield served


def test_the_anthropic_sdk_streaming_and_not_with_exact_token_counts(served: Served) -> None:
    session_id, key = served.open()
    client = anthropic.Anthropic(base_url=served.base_url, api_key=key, max_retries=0)
    messages: Any = [{"role": "user", "content": "Say it."}]
    plain = client.messages.create(model="m", max_tokens=50, messages=messages, tools=[BASH])  # type: ignore[list-item]
    assert [b.text for b in plain.content if b.type == "text"] == [SAID]
    count = client.messages.count_tokens(model="m", messages=messages, tools=[BASH])  # type: ignore[list-item]
    assert count.input_tokens == plain.usage.input_tokens
    messages += [{"role": "assistant", "content": plain.content}, {"role": "user", "content": "And again."}]
    with client.messages.stream(model="m", max_tokens=50, messages=messages, tools=[BASH]) as stream:  # type: ignore[list-item]
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    finished = served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 1.0}).json()
    assert finished["audit"]["violations"] == []
    assert len(finished["samples"]) == 1
    sample = finished["samples"][0]
    assert sample["reward"] == 1.0
    assert sum(sample["loss_mask"]) == plain.usage.output_tokens + final.usage.output_tokens
    with pytest.raises(anthropic.PermissionDeniedError, match="sealed"):
        client.messages.create(model="m", max_tokens=50, messages=messages)


def test_the_openai_sdk_streaming_and_not(served: Served) -> None:
    session_id, key = served.open()
    client = openai.OpenAI(base_url=f"{served.base_url}/v1", api_key=key, max_retries=0)
    messages: Any = [{"role": "user", "content": "Say it."}]
    plain = client.chat.completions.create(model="m", messages=messages)
    assert plain.choices[0].message.content == SAID
    messages += [{"role": "assistant", "content": SAID}, {"role": "user", "content": "Again."}]
    text, usage = "", None
    stream = client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == SAID
    assert usage is not None
    assert usage.completion_tokens > 0
    state = served.control("GET", f"/control/sessions/{session_id}").json()
    assert (state["turns"], state["forks"], state["state"]) == (2, [], "open")
    assert [m.id for m in client.models.list().data] == ["scripted"]


def test_bad_input_gets_one_clear_error_in_the_dialects_shape(served: Served) -> None:
    _, key = served.open()
    url = f"{served.base_url}/v1/messages"
    reply = httpx.post(url, json={}, headers={"x-api-key": "wrong"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    reply = httpx.post(url, content=b'{"messages": [', headers={"x-api-key": key})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "no JSON" in reply.json()["error"]["message"]
    reply = httpx.post(
        f"{served.base_url}/v1/chat/completions", content=b"[]", headers={"Authorization": f"Bearer {key}"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    big = b'{"messages": "' + b"x" * (33 << 20) + b'"}'
    reply = httpx.post(url, content=big, headers={"x-api-key": key}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")
    assert httpx.get(served.base_url).status_code == 200
    assert httpx.head(served.base_url).status_code == 200
    assert httpx.get(f"{served.base_url}/nowhere").status_code == 404


def test_agents_reach_neither_the_control_side_nor_another_session(served: Served) -> None:
    session_id, key = served.open(metadata={"who": "a"})
    for path in (f"/control/sessions/{session_id}", "/metrics", f"/control/sessions/{session_id}/finish"):
        assert httpx.post(f"{served.base_url}{path}", headers={"x-api-key": key}).status_code == 404
        assert served.control("GET", path, key=key).status_code == 401
    assert served.control("DELETE", f"/control/sessions/{session_id}", key="x").status_code == 401
    assert served.control("GET", f"/control/sessions/{session_id}").json()["metadata"] == {"who": "a"}


def test_the_control_side_refuses_what_makes_no_sense(served: Served) -> None:
    session_id, _ = served.open()
    assert served.control("POST", "/control/sessions", {"session_id": session_id}).status_code == 409
    assert served.control("POST", "/control/sessions", {"sesion_id": "x"}).status_code == 400
    assert served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 1.5}).status_code == 400
    assert served.control("GET", "/control/sessions/nobody").status_code == 404
    assert served.control("POST", "/control/sessions", {"session_id": "../etc"}).status_code == 400
    assert served.control("DELETE", f"/control/sessions/{session_id}").status_code == 204
    assert served.control("GET", f"/control/sessions/{session_id}").status_code == 404


def journals_open(pid: int) -> int:
    """Files of the run that a process and its workers hold open."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    names = []
    for fd in (fd for one in pids for fd in Path(f"/proc/{one}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(fd))
    return sum(name.endswith(".jsonl.gz") for name in names)


def test_sessions_deleted_without_an_outcome_leave_no_file_open(served: Served) -> None:
    before = journals_open(served.process.pid)
    opened = [served.open()[0] for _ in range(3)]
    assert journals_open(served.process.pid) == before + 3
    for session_id in opened:
        served.control("DELETE", f"/control/sessions/{session_id}")
    assert journals_open(served.process.pid) == before


def test_pause_resume_health_and_metrics(served: Served) -> None:
    assert served.control("POST", "/control/pause").json() == {"paused": True}
    assert httpx.get(f"{served.control_url}/healthz").json()["paused"] is True
    resumed = served.control("POST", "/control/resume", {"weight_version": "v2"}).json()
    assert resumed == {"paused": False, "weight_version": "v2"}
    session_id, key = served.open()
    client = anthropic.Anthropic(base_url=served.base_url, api_key=key, max_retries=0)
    client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "Say it."}])
    metrics = served.control("GET", "/metrics").text
    turns = next(line for line in metrics.splitlines() if line.startswith("sandlot_turns_total "))
    assert float(turns.split()[1]) >= 1
    served.control("POST", f"/control/sessions/{session_id}/finish", {})


def test_finished_sessions_stand_audited_in_the_run_directory(served: Served) -> None:
    session_id, key = served.open(metadata={"task": "t"})
    client = anthropic.Anthropic(base_url=served.base_url, api_key=key, max_retries=0)
    client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "Say it."}])
    served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 0.25, "metadata": {"note": "n"}})
    run = RunDir.read(served.run)
    found = audit_run(run)
    assert found.violations == []
    row = run.result(session_id)
    assert row is not None
    assert (row["reward"], row["metadata"]["note"], row["metadata"]["task"]) == (0.25, "n", "t")
    assert [s.reward for s in run.samples() if s.episode_id == session_id] == [0.25]


def test_a_group_is_told_at_the_beginning_or_at_the_end_and_is_else_ones_own(served: Served) -> None:
    sessions = {
        served.open()[0]: ({}, ""),
        served.open()[0]: ({"group_id": "late"}, "late"),
        served.open(metadata={"group_id": "early"})[0]: ({}, "early"),
        served.open(metadata={"group_id": "early"})[0]: ({"group_id": "late"}, "late"),
    }
    for session_id, (body, _) in sessions.items():
        finished = served.control("POST", f"/control/sessions/{session_id}/finish", {"reward": 1.0, **body})
        assert finished.status_code == 200
    run = RunDir.read(served.run)
    assert audit_run(run).violations == []
    for session_id, (_, group) in sessions.items():
        row = run.result(session_id)
        assert row is not None
        assert row["group_id"] == (group or session_id)


def test_what_a_killed_gateway_left_is_completed_by_the_next(tmp_path: Path) -> None:
    """Its journal is sealed, its result was not written; one beside it is damaged, which holds nobody up."""
    model = make_toy_model(tmp_path / "toy")
    with gateway_process(tmp_path, model):
        pass
    with RunDir.create_or_continue(tmp_path / "run", RunDir.read(tmp_path / "run").config) as run:
        for name in ("bad", "good"):
            with run.begin(SessionRecord(episode_id=name, group_id="g")) as journal:
                journal.turn(make_turn("t0", (1, 2), (3,)))
                journal.append(SealedRecord(reward=1.0))
        run.journal_path("bad").write_bytes(b"\0" + run.journal_path("bad").read_bytes())
    with gateway_process(tmp_path, model) as served:
        row = RunDir.read(served.run).result("good")
    assert row is not None
    assert (row["reward"], row["samples"]) == (1.0, 1)
    assert "bad.jsonl.gz is damaged at byte 0" in (tmp_path / "gateway.log").read_text()


def test_addresses_of_the_next_generation_are_told_as_such(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    more = ("--host", "::1", "--control-host", "::1")
    with gateway_process(tmp_path, make_toy_model(tmp_path / "toy"), more=more) as served:
        assert served.base_url.startswith("http://[::1]:")
        _, key = served.open()
        assert httpx.get(f"{served.base_url}/v1/models", headers={"x-api-key": key}).status_code == 200
