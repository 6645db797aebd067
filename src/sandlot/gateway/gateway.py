"""The gateway: many sessions, one policy; opened and finished by the control side, used by the agents."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sandlot.engine.base import SamplingParams
from sandlot.engine.probe import require_sampled
from sandlot.engine.replicas import ReplicatedEngine
from sandlot.engine.resumable import PauseMode, ResumableEngine
from sandlot.errors import ConfigError
from sandlot.gateway.admission import Budget, check_room
from sandlot.gateway.call import Policy, Recorder
from sandlot.gateway.connections import BoundedRunner
from sandlot.gateway.keys import key_digest, new_key
from sandlot.gateway.ledger import Writers
from sandlot.gateway.limits import GatewayLimits, SessionLimits
from sandlot.gateway.metrics import Metrics
from sandlot.gateway.server import agent_app
from sandlot.gateway.session import Session
from sandlot.trajectory.audit import AuditReport, audit
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.samples import linearize
from sandlot.trajectory.turn import Turn

_http_log = logging.getLogger("sandlot.gateway.http")
# What is no HTTP is told to who sent it: an agent could fill the log with it, its key in every traceback.
_http_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

_CONNECTIONS = 256
"""How many one sandbox may hold open, or an agent could use up the file descriptors of all."""
_LARGE = 1_000_000
"""Characters of a prompt, or bytes of a request, that are larger than nearly any context."""

RecorderFactory = Callable[[str, Mapping[str, Any]], Recorder]
"""Session id and header (metadata, sampling, limits, model) → where its turns are kept."""


@dataclass(frozen=True)
class Opened:
    """A session as its opener gets it. The key is told here only."""

    session: Session
    api_key: str


@dataclass(frozen=True)
class Finished:
    """The samples of a sealed session, and the proof that came with them."""

    samples: list[Sample]
    report: AuditReport


class NoRecorder:
    """Keeps nothing: for sessions whose samples are taken from memory at `finish`."""

    def turn(self, turn: Turn) -> None: ...

    def delivered(self, turn_id: str) -> None: ...

    def event(self, kind: str, detail: Mapping[str, Any]) -> None: ...

    def sealed(self, detail: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Gateway:
    """Serves agents on any number of sockets. One event loop; use as an async context manager.

    `worker` is its number where it is one of several processes, `lost` the digests of keys whose sessions an earlier
    process of that number took with it.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        limits: GatewayLimits | None = None,
        session_limits: SessionLimits | None = None,
        recorder: RecorderFactory | None = None,
        worker: int | None = None,
        lost: Collection[bytes] = (),
    ) -> None:
        self._engine = ResumableEngine(policy.engine, lambda session_id: self.sessions[session_id].clock.held())
        self.policy = replace(policy, engine=self._engine)
        self.replicas = policy.engine if isinstance(policy.engine, ReplicatedEngine) else None
        self.limits = limits or GatewayLimits()
        self.session_limits = session_limits or SessionLimits()
        self.worker = worker
        self.lost = frozenset(lost)
        self.started = time.time()
        self.metrics = Metrics(self)
        self.sessions: dict[str, Session] = {}
        self._recorder = recorder or (lambda session_id, header: NoRecorder())
        self._keys: dict[bytes, Session] = {}
        self._finishing: dict[str, asyncio.Task[Finished]] = {}
        self._runners: list[web.AppRunner] = []
        self.reading = Budget(self.limits.reading_bytes)
        self.at_engine = Budget(self.limits.engine_tokens)
        # One renders at a time: it holds the interpreter lock for most of its time, and the event loop needs it too.
        # What is larger than any context has a thread of its own, or one agent could hold all others up for seconds.
        self._threads, self._large = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"sandlot-gateway{kind}") for kind in ("", "-large")
        )
        self._writers = Writers(alone=lambda: not self.reading.used and not self.at_engine.used)

    # -- sessions -----------------------------------------------------------------------------------------------

    def open(
        self,
        session_id: str | None = None,
        *,
        sampling: SamplingParams | None = None,
        max_context: int | None = None,
        limits: SessionLimits | None = None,
        metadata: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
    ) -> Opened:
        """Open a session; `recorder` keeps its turns instead of the gateway's own.

        Raises `ConfigError` when the id is taken or the gateway is full, or when the engine's logprobs are not those of
        what would be sampled.
        """
        session_id = session_id or secrets.token_hex(12)
        check_room(session_id, self.sessions, self.limits.sessions)
        require_sampled(self.policy.logprobs_mode, sampling or self.policy.sampling)
        policy = replace(
            self.policy,
            sampling=sampling or self.policy.sampling,
            max_context=min(max_context or self.policy.max_context, self.policy.max_context),
        )
        policy = replace(
            policy,
            sampling=replace(
                policy.sampling,
                stop_token_ids=tuple(dict.fromkeys((*policy.format.stop_token_ids, *policy.sampling.stop_token_ids))),
            ),
        )
        header = {
            "session_id": session_id,
            "model": policy.model,
            "sampling": policy.sampling.as_dict(),
            "logprobs_mode": policy.logprobs_mode,
            "max_context": policy.max_context,
            "metadata": dict(metadata or {}),
        }
        session = Session(
            session_id,
            policy,
            recorder or self._recorder(session_id, header),
            limits=limits or self.session_limits,
            metadata=metadata,
            gate=self._gate,
            admit=self.at_engine.wait,
            in_thread=self.in_thread,
            in_writer=self._writers.run,
            retry_delays=self.limits.engine_retry_delays,
        )
        api_key = new_key(self.worker)
        self.sessions[session_id] = session
        self._keys[key_digest(api_key)] = session
        return Opened(session, api_key)

    def session(self, session_id: str) -> Session:
        """The session called this; `ConfigError` when there is none."""
        if session_id not in self.sessions:
            raise ConfigError(f"there is no session called {session_id!r}")
        return self.sessions[session_id]

    def session_of_key(self, api_key: str) -> Session | None:
        """The session this secret opens, or None. Unknown keys never make one."""
        return self._keys.get(key_digest(api_key))

    async def finish(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        episode_id: str | None = None,
        group_id: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> Finished:
        """Seal the session and give its audited samples. Idempotent: the first answer is kept.

        It goes on when the caller is cancelled; whoever asks again gets its outcome. Raises `AuditError` when a sample
        does not prove what it claims; nothing leaves then.
        """
        session = self.session(session_id)
        task = self._finishing.get(session_id)
        if task is None or (task.done() and task.exception() is not None):  # what failed may pass, like a full disk
            work = self._finish(session, reward, episode_id or session_id, group_id, dict(metadata or {}))
            task = self._finishing[session_id] = asyncio.create_task(work)
        return await asyncio.shield(task)

    async def _finish(
        self, session: Session, reward: float | None, episode_id: str, group_id: str, metadata: dict[str, Any]
    ) -> Finished:
        await session.seal(self.limits.drain)
        group_id = group_id or str(session.metadata.get("group_id") or episode_id)  # else one of its own
        turns = session.recorded_turns()
        samples = await self.in_thread(
            functools.partial(
                linearize,
                turns,
                episode_id=episode_id,
                group_id=group_id,
                reward=reward,
                metadata={**session.metadata, **metadata},
            )
        )
        report: AuditReport = await self.in_thread(audit, turns, samples)
        report.raise_for_violations()
        await session.record_seal({"reward": reward, "group_id": group_id, "metadata": metadata})
        return Finished(samples, report)

    async def delete(self, session_id: str) -> None:
        """Forget a session and its key. What is in flight is aborted."""
        session = self.session(session_id)
        await session.seal(self.limits.drain)
        if (finishing := self._finishing.get(session_id)) is not None:
            await asyncio.wait({finishing})
        if self.sessions.get(session_id) is not session:
            return  # somebody else deleted it meanwhile
        self.metrics.forget(session_id)
        self.sessions.pop(session_id)
        self._finishing.pop(session_id, None)
        self._keys = {key: other for key, other in self._keys.items() if other is not session}
        await session.close()

    # -- weight updates -----------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "drain") -> None:
        """Hold back new engine calls and wait until none is at the engine.

        `drain` lets the calls under way finish. `abort` ends them at the engine and keeps what they sampled: after
        `resume` they go on from there, as one turn with a version span per part. `ConfigError` when the engine cannot.
        """
        await self._engine.pause(mode)

    def resume(self, weight_version: str | None = None) -> None:
        """Let calls go on; tokens from now on carry `weight_version` where the engine names none."""
        self._engine.resume(weight_version)

    @property
    def paused(self) -> bool:
        return self._engine.paused

    @property
    def weight_version(self) -> str:
        return self._engine.weight_version

    @property
    def engines_out(self) -> dict[str, str]:
        """Addresses of replicas that do not serve, and why."""
        return self.replicas.out if self.replicas is not None else {}

    @contextlib.asynccontextmanager
    async def _gate(self) -> AsyncIterator[str]:
        """Around each engine call: gives the weight version in force."""
        yield self.weight_version

    # -- sockets ------------------------------------------------------------------------------------------------

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve all sessions on a TCP port; the port in use."""
        runner = await self.runner(agent_app(self), self.limits.connections)
        site = web.TCPSite(runner, host, port)
        await site.start()
        return int(runner.addresses[0][1])

    async def serve_socket(self, sock: socket.socket, session: Session) -> web.AppRunner:
        """Serve one session on a listening socket handed out of its sandbox."""
        runner = await self.runner(agent_app(self, bound=session), _CONNECTIONS)
        await web.SockSite(runner, sock).start()
        return runner

    async def stop_serving(self, runner: web.AppRunner) -> None:
        """Close one of the gateway's sockets and its connections."""
        self._runners.remove(runner)
        await runner.cleanup()

    async def serve_app(self, app: web.Application, host: str, port: int) -> int:
        """Serve another application of the gateway (the control side); the port in use."""
        runner = await self.runner(app)
        await web.TCPSite(runner, host, port).start()
        return int(runner.addresses[0][1])

    async def runner(self, app: web.Application, connections: int = sys.maxsize) -> web.AppRunner:
        """Set an application of the gateway up, for so many connections at once; it is closed with the gateway."""
        # Handlers are cancelled when their client goes, which is how an abandoned call is noticed.
        # Bodies stay packed: those for another process are passed on as they are.
        runner = BoundedRunner(
            app,
            connections,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=_http_log,
            shutdown_timeout=2.0,
        )
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def in_thread(self, function: Callable[..., Any], *args: Any, size: int = 0) -> Any:
        """Run what takes long off the event loop; `size` is how many characters or bytes it is about."""
        threads = self._large if size > _LARGE else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)

    async def close(self) -> None:
        """Seal every session, stop serving."""
        await asyncio.gather(*(session.seal(self.limits.drain) for session in self.sessions.values()))
        await asyncio.gather(*self._finishing.values(), return_exceptions=True)
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        self._threads.shutdown(wait=True)
        self._large.shutdown(wait=True)
        self._writers.close()

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
