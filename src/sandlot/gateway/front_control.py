"""The control side of a gateway with several workers: it knows which of them has a session, and asks that one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from sandlot.errors import ConfigError
from sandlot.gateway.admission import check_room
from sandlot.gateway.control import OpenBody, PauseBody, ResumeBody, body_of, json_answer, prometheus
from sandlot.gateway.keys import key_digest
from sandlot.gateway.metrics import Merged
from sandlot.gateway.relay import relay
from sandlot.gateway.workers import Worker, Workers

_HEALTH_S = 1.0
"""How long a worker may take to tell how it is."""
_SCRAPE_S = 5.0
"""How long a worker may take to tell its metrics: whoever scrapes waits some ten seconds."""


@dataclass
class _Placed:
    """Where a session is. `lost` says how its worker ended."""

    worker: Worker
    key: str = ""
    lost: str = ""


class FrontControl:
    """Opens each session at the worker that has the fewest; pauses and resumes all of them together."""

    def __init__(self, workers: Workers, max_sessions: int) -> None:
        self._workers = workers
        self._max_sessions = max_sessions
        self._placed: dict[str, _Placed] = {}
        self._metrics = Merged()
        self._paused = False
        self._weight_version: str | None = None
        self._orders = 0
        workers.brief = self._brief
        workers.bury = self._bury

    # -- sessions -----------------------------------------------------------------------------------------------

    async def open(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, OpenBody)
        session_id = body.session_id or secrets.token_hex(12)
        held = {name: placed for name, placed in self._placed.items() if not placed.lost}
        check_room(session_id, held, self._max_sessions)
        if not (up := self._workers.up):
            return _unavailable("no gateway worker is running")
        load = Counter(placed.worker.number for placed in held.values())
        worker = min(up, key=lambda one: (one.silent, load[one.number]))
        placed = self._placed[session_id] = _Placed(worker)
        opened = False
        try:
            asked = body.model_dump(exclude_unset=True) | {"session_id": session_id}
            async with worker.client.post("/control/sessions", json=asked) as answer:
                raw = await answer.read()
            if opened := answer.status == 201:
                placed.key = key_digest(msgspec.json.decode(raw)["api_key"]).hex()
            return web.Response(body=raw, status=answer.status, content_type="application/json")
        except aiohttp.ClientConnectionError:
            return _unavailable("the gateway worker ended while it opened the session")
        finally:
            if not opened:
                self._placed.pop(session_id, None)

    async def state(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request)

    async def finish(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        session_id, placed = self._find(request)
        answer = web.Response(status=204) if placed.lost else await self._ask(request)
        if answer.status == 204:
            self._placed.pop(session_id, None)
        return answer

    def _find(self, request: web.Request) -> tuple[str, _Placed]:
        session_id = request.match_info["id"]
        if (placed := self._placed.get(session_id)) is None:
            raise ConfigError(f"there is no session called {session_id!r}")
        return session_id, placed

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        session_id, placed = self._find(request)
        if not placed.lost:
            try:
                return await relay(request, placed.worker.client)
            except aiohttp.ClientConnectionError:
                return _unavailable("the gateway worker that has this session does not answer")
        error = (
            f"session {session_id!r} is lost: the gateway worker that had it ended ({placed.lost}); "
            "its recorded turns are in its journal; open it again"
        )
        return json_answer({"error": error}, status=410)

    # -- weight updates -----------------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, PauseBody)
        self._orders += 1
        order = self._orders
        self._paused = True
        answers = await self._tell_all("/control/pause", body.model_dump())
        if refused := next((answer for answer in answers if answer.status != 200), None):
            if order == self._orders:
                self._paused = False
            return refused
        return json_answer({"paused": True})

    async def resume(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, ResumeBody)
        self._orders += 1
        self._paused = False
        self._weight_version = body.weight_version or self._weight_version
        answers = await self._tell_all("/control/resume", body.model_dump())
        return answers[0] if answers else _unavailable("no gateway worker is running")

    async def _tell_all(self, path: str, body: Mapping[str, Any]) -> list[web.Response]:
        """The answers of all workers, but of those that end meanwhile: no call of theirs goes on."""
        answers = await asyncio.gather(*(_tell(worker, path, body) for worker in self._workers.up))
        return [answer for answer in answers if answer is not None]

    async def _brief(self, worker: Worker) -> None:
        """Bring a new worker to the state that the others are in, which may change meanwhile."""
        told: tuple[bool, str | None] = (False, None)
        while told != (now := (self._paused, self._weight_version)):
            await _tell(worker, "/control/resume", {"weight_version": now[1]})
            if now[0]:
                await _tell(worker, "/control/pause", {})
            told = now

    def _bury(self, worker: Worker, how: str) -> None:
        self._metrics.ended(worker.number)
        for placed in self._placed.values():
            if placed.worker is worker and not placed.lost:
                placed.lost = how
                worker.lost.append(placed.key)

    # -- what is seen from outside ------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.StreamResponse:
        sessions = sum(not placed.lost for placed in self._placed.values())
        answers = await asyncio.gather(*(_in_time(worker, "/healthz", _HEALTH_S) for worker in self._workers.up))
        told = [msgspec.json.decode(answer) for answer in answers if answer is not None]
        out = {name: why for one in told for name, why in one["engines_out"].items()}
        up = len(self._workers.up)
        status = "ok" if up == len(self._workers.all) and not out else "degraded"
        return json_answer(
            {"status": status, "sessions": sessions, "paused": self._paused, "engines_out": out, "workers": up}
        )

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        await asyncio.gather(*(self._scrape(worker) for worker in self._workers.up))
        return prometheus(self._metrics.text())

    async def _scrape(self, worker: Worker) -> None:
        """Ask a worker for its counts; of one that hangs the last are told."""
        answer = await _in_time(worker, "/metrics", _SCRAPE_S)
        if answer is not None and worker.up.is_set():
            self._metrics.told(worker.number, answer.decode())


async def _in_time(worker: Worker, path: str, seconds: float) -> bytes | None:
    """What a worker answers; None when it ends before, or does not within so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            if (answer := await _tell(worker, path)) is not None:
                assert isinstance(answer.body, bytes)
                return answer.body
    return None


async def _tell(worker: Worker, path: str, body: Mapping[str, Any] | None = None) -> web.Response | None:
    """What a worker answers to a body, or to a question without one; None when it ends before."""
    try:
        async with worker.client.request("GET" if body is None else "POST", path, json=body) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
    except aiohttp.ClientConnectionError:
        return None


def _unavailable(why: str) -> web.Response:
    return json_answer({"error": f"{why}; try again in some seconds"}, status=503)
