"""One episode: an agent in a sandbox, its calls through the gateway, its diff graded apart, all of it journaled."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sandlot.config import RunConfig
from sandlot.errors import CaptureError, FailureKind, SandlotError
from sandlot.gateway import Gateway, Session, SessionLimits
from sandlot.gateway.clock import OutOfTimeError
from sandlot.grading import Verdict, grade
from sandlot.grading.runtime import runtime_env, runtime_layers
from sandlot.harness import Endpoint, Harness
from sandlot.rollout.calls import suspicion_of
from sandlot.rollout.outcome import EpisodeResult, Evidence, failure_of
from sandlot.rollout.progress import Progress
from sandlot.rollout.recorder import JournalRecorder
from sandlot.sandbox import ExecResult, Layer, Limits, Sandbox, SandboxBackend, SandboxSpec
from sandlot.tasks import Task
from sandlot.trajectory.journal import JournalWriter
from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import RunDir
from sandlot.trajectory.store import write_bytes
from sandlot.workspace import Patch, capture, prepare

PORT = 8400
"""Where the agent finds its model inside its sandbox."""

PROMPT = """\
{statement}

The repository is in the current directory, {workdir}. Change its code so that the problem is solved, and check your \
work by running it. Leave your changes in the working tree."""


@dataclass(frozen=True)
class Episode:
    """One attempt at one task by one harness."""

    task: Task
    harness: str
    attempt: int

    @property
    def group_id(self) -> str:
        return f"{self.task.id}--{self.harness}"

    @property
    def id(self) -> str:
        return f"{self.group_id}--{self.attempt}"


@dataclass
class _Ended:
    """What is known when the episode is over."""

    failure: FailureKind | None = None
    detail: str = ""
    verdict: Verdict | None = None
    patch: Patch | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = round(self.seconds.get(phase, 0.0) + time.monotonic() - started, 3)


@dataclass(frozen=True)
class EpisodeRunner:
    """What all episodes of a run share. `layers` are those of each harness, installed already."""

    config: RunConfig
    gateway: Gateway
    backend: SandboxBackend
    run: RunDir
    harnesses: Mapping[str, Harness]
    layers: Mapping[str, tuple[Layer, ...]]
    progress: Progress

    async def __call__(self, spec: Episode) -> EpisodeResult:
        """Run the episode to its result row. What breaks on the way becomes a failure kind, never an exception;
        only a real cancellation from outside gets through."""
        for number in range(1, self.config.retries + 2):
            policy = self.gateway.policy
            header = SessionRecord(
                episode_id=spec.id,
                group_id=spec.group_id,
                sampling=policy.sampling.as_dict(),
                metadata={"task": spec.task.id, "harness": spec.harness, "attempt": spec.attempt},
                session={
                    "try": number,
                    "model": policy.model,
                    "max_context": policy.max_context,
                    "image": spec.task.image,
                },
            )
            journal = await asyncio.to_thread(self.run.begin, header)
            try:
                ended = await self._try(spec, number, journal)
                lost = ended.failure in (FailureKind.INFRA_ERROR, FailureKind.ABORTED)
                if lost and number <= self.config.retries:
                    continue  # the journal stays unsealed: the next try sets it aside
                self.progress.phase(spec.id, "writing")
                row = await asyncio.to_thread(self._seal, spec, journal, ended, number)
            finally:
                journal.close()
            result = EpisodeResult.from_row(row)
            self.progress.done(result)
            return result
        raise AssertionError("the last try always returns")

    async def _try(self, spec: Episode, number: int, journal: JournalWriter) -> _Ended:
        ended = _Ended()
        task = asyncio.current_task()
        try:
            await self._attempt(spec, number, journal, ended)
        except SandlotError as error:
            ended.failure, ended.detail = error.kind, str(error)
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            # A library's own cancellation, from inside the episode: its sandbox is lost, its siblings are not.
            ended.failure, ended.detail = FailureKind.INFRA_ERROR, "a call inside the episode was cancelled"
        except Exception as error:
            ended.failure, ended.detail = FailureKind.INFRA_ERROR, f"{type(error).__name__}: {error}"
        return ended

    async def _attempt(self, spec: Episode, number: int, journal: JournalWriter, ended: _Ended) -> None:
        phase, task = self.progress.phase, spec.task
        recorder = JournalRecorder(journal, lambda turns, tokens: self.progress.turn(spec.id, turns, tokens))
        session_id = f"{spec.id}.{number}"
        sampling = self.gateway.policy.sampling
        if sampling.seed is not None:  # attempts of a group must differ, and the same attempt must not
            sampling = replace(sampling, seed=sampling.seed + zlib.crc32(spec.id.encode()))
        opened = self.gateway.open(session_id, sampling=sampling, limits=self._session_limits(task), recorder=recorder)
        try:
            phase(spec.id, "booting")
            with ended.timed("boot"):
                sandbox = await self.backend.create(await self._sandbox_spec(spec))
            async with sandbox:
                with ended.timed("prepare"):
                    prepared = await prepare(sandbox, task)
                ended.facts["sandbox"] = dict(sandbox.facts)
                phase(spec.id, "agent")
                with ended.timed("agent"):
                    result = await self._agent(spec, sandbox, opened.session, opened.api_key)
                await asyncio.to_thread(self._log, spec, result)
                turns, chat = list(opened.session.turns), self.gateway.policy.format
                ended.facts["suspicion"] = await asyncio.to_thread(suspicion_of, task, turns, chat)
                ended.failure, ended.detail = self._judge(spec, opened.session, result)
                if ended.failure is not None and not ended.failure.trainable:
                    return
                phase(spec.id, "capturing")
                with ended.timed("capture"):
                    try:
                        ended.patch = await capture(sandbox, prepared, workdir=task.workdir)
                    except CaptureError as error:  # graded as if it had done nothing: nobody is spared by such an end
                        ended.failure, ended.detail = error.kind, str(error)
            phase(spec.id, "grading")
            with ended.timed("grade"):
                options, limits = self.config.grading.over(task.options), SandboxSpec(limits=self._limits())
                ended.verdict = await grade(task, ended.patch or b"", self.backend, spec=limits, options=options)
        finally:
            ended.facts["stopped_by"] = opened.session.counters.stopped_by
            ended.facts["calls"] = dict(opened.session.counters.calls)
            ended.facts["unserved_seconds"] = round(opened.session.clock.stood, 3)
            await self.gateway.delete(session_id)

    async def _agent(self, spec: Episode, sandbox: Sandbox, session: Session, api_key: str) -> ExecResult:
        """Run the CLI to its end; afterwards the session is sealed and nothing of the agent lives."""
        policy, harness = self.gateway.policy, self.harnesses[spec.harness]
        endpoint = Endpoint(
            base_url=f"http://127.0.0.1:{PORT}",
            api_key=api_key,
            model=policy.model,
            context_window=policy.max_context,
            max_output_tokens=policy.sampling.max_tokens or min(32_000, policy.max_context // 4),
        )
        served = await self.gateway.serve_socket(sandbox.listen(PORT), session)
        try:
            await harness.configure(sandbox, endpoint)
            prompt = PROMPT.format(statement=spec.task.statement.strip(), workdir=spec.task.workdir)
            command = harness.command(prompt, endpoint)
            session.clock.begin()  # what came before is none of its doing
            process = await sandbox.spawn(
                command.argv, cwd=command.cwd or spec.task.workdir, env=command.env, stdin=command.stdin
            )
            try:
                async with session.in_time():
                    return await process.wait()
            except OutOfTimeError:
                return await process.wait(0)
        finally:
            await session.seal(self.gateway.limits.drain)
            await self.gateway.stop_serving(served)

    def _judge(self, spec: Episode, session: Session, result: ExecResult) -> tuple[FailureKind | None, str]:
        kind, detail = self.harnesses[spec.harness].failure(result)
        counters = session.counters
        # A sub-agent may be cut off in mid-answer by its parent's ordinary end, so the main conversation decides.
        turns = [t for t in session.turns if t.branch == "main"] or session.turns
        last_delivered = not turns or turns[-1].id in session.delivered_turns
        return failure_of(
            Evidence(counters.turns, last_delivered, counters.engine_error, counters.stopped_by, kind, detail)
        )

    def _seal(self, spec: Episode, journal: JournalWriter, ended: _Ended, number: int) -> dict[str, Any]:
        verdict, failure, detail = ended.verdict, ended.failure, ended.detail
        if verdict is not None and verdict.reward is None:
            failure, detail = verdict.failure, verdict.detail
        patch = ended.patch
        if patch is not None:
            write_bytes(self.run.patch_path(spec.id), patch.diff)
        metadata = {
            "detail": detail,
            "seconds": ended.seconds,
            "tries": number,
            "patch_bytes": len(patch.diff) if patch else 0,
            "patch_files": list(patch.files) if patch else [],
            "patch_omitted": list(patch.omitted) if patch else [],
            **ended.facts,
        }
        journal.append(
            SealedRecord(
                reward=verdict.reward if verdict else None,
                failure=failure and str(failure),
                verdict=_plain(asdict(verdict)) if verdict else {},
                metadata=_plain(metadata),
            )
        )
        return self.run.complete(spec.id)

    def _log(self, spec: Episode, result: ExecResult) -> None:
        for stream, data in (("stdout", result.stdout), ("stderr", result.stderr)):
            if data:
                self.run.log_path(spec.id, f"agent.{stream}").write_bytes(data)

    async def _sandbox_spec(self, spec: Episode) -> SandboxSpec:
        image = spec.task.image
        return SandboxSpec(
            image=image,
            layers=(*await asyncio.to_thread(runtime_layers, image), *self.layers[spec.harness]),
            env=runtime_env(image),
            workdir=spec.task.workdir,
            limits=self._limits(),
            network="gateway",
            labels={"run": str(self.run.path.name), "episode": spec.id},
        )

    def _limits(self) -> Limits:
        return self.config.sandbox_limits.over(Limits())

    def _session_limits(self, task: Task) -> SessionLimits:
        ours, theirs = self.config.limits, task.limits
        return SessionLimits(
            turns=ours.turns or theirs.turns,
            tokens=ours.tokens or theirs.tokens,
            wall_clock=ours.wall_clock or theirs.wall_clock,
        )


def _plain(value: Any) -> Any:
    """`value` as JSON in UTF-8 can hold it: what agents and tests say may have halves of characters in it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_plain(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, int | float | bool | None) else _plain(str(value))
