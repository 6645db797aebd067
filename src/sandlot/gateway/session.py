"""A session: all model calls of one episode, from canonical request to recorded turn.

One call goes: identity (join, replay or new) → limits → prompt ids by continuity → engine → parse → journal → told.
A turn exists once it is journaled, which is before the agent sees its last byte; a call that nobody waits for any
more before that leaves nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from sandlot.chat.base import ChatFormat
from sandlot.chat.continuity import Continuity, Match
from sandlot.chat.messages import CallStatus, Message, ToolCall, digest
from sandlot.engine.base import Engine, Generation, SamplingParams
from sandlot.engine.ids import PromptIds
from sandlot.errors import ContextOverflowError, EngineError, SandlotError
from sandlot.gateway.bodies import Bodies
from sandlot.gateway.limits import SessionLimits
from sandlot.gateway.prompts import Prompts
from sandlot.gateway.wire.base import Answer, ChatRequest, Head, WireError
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Ids, Turn, ids_array, ids_sha256

SENT_STATUSES: frozenset[CallStatus] = frozenset({"ok", "unknown_tool", "invalid_arguments"})
"""Calls the agent is told of as calls; the others it sees as text."""


log = logging.getLogger(__name__)
_DECLINED = "the chat format renders in full here"
_SEALED = "this session is sealed; no more calls are answered"


class Recorder(Protocol):
    """Where a session's turns are kept. Blocking; called in threads, one call at a time per session."""

    def turn(self, turn: Turn) -> None: ...

    def delivered(self, turn_id: str) -> None: ...

    def event(self, kind: str, detail: Mapping[str, Any]) -> None: ...

    def sealed(self, detail: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Policy:
    """What samples for a session: shared by all sessions of a gateway unless one asks for its own sampling."""

    engine: Engine
    format: ChatFormat
    model: str
    sampling: SamplingParams
    max_context: int
    logprobs_mode: str


@dataclass(frozen=True)
class _Asked:
    """What was sent to the engine, and for whom."""

    request: ChatRequest
    match: Match
    identity: bytes
    call_prefix: str
    head: Head
    prompt: PromptIds
    new_ids: Ids
    sampling: SamplingParams
    version: str


@dataclass(frozen=True)
class Told:
    """A recorded turn with what the agent is told of it."""

    turn_id: str
    answer: Answer


@dataclass
class Call:
    """One call in flight. Used as a context manager by each handler that waits for it: when the last one leaves
    before the turn is recorded, the call is cancelled and with it the engine's work."""

    head: Head
    prepared: asyncio.Future[int]
    abandon: Callable[[], None] = field(init=False)
    task: asyncio.Task[Told] = field(init=False)
    _waiters: int = 0

    def __enter__(self) -> Call:
        self._waiters += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiters -= 1
        if self._waiters == 0 and not self.task.done():
            self.abandon()

    async def ready(self) -> Head:
        """Wait until the prompt is known. Raises `WireError` when the call is refused before sampling."""
        return replace(self.head, prompt_tokens=await asyncio.shield(self.prepared))

    async def result(self) -> Told:
        """Wait for the recorded turn. Raises `WireError` when there is none."""
        return await asyncio.shield(self.task)


@dataclass
class Counters:
    """What happened so far. `engine_error` is the last engine failure that no later turn followed."""

    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    joined: int = 0
    replayed: int = 0
    abandoned: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    engine_error: str = ""
    stopped_by: str = ""


class Session:
    """One episode's model calls. Lives on one event loop."""

    def __init__(
        self,
        session_id: str,
        policy: Policy,
        recorder: Recorder,
        *,
        limits: SessionLimits,
        metadata: Mapping[str, Any] | None = None,
        gate: Callable[[], AbstractAsyncContextManager[str]],
        in_thread: Callable[..., Awaitable[Any]],
        retry_delays: Sequence[float] = (),
    ) -> None:
        self.id = session_id
        self.policy = policy
        self.limits = limits
        self.metadata = dict(metadata or {})
        self.opened = time.time()
        self.counters = Counters()
        self.tree = SessionTree()
        self.forks: list[tuple[str, str]] = []
        self.turns: list[Turn] = []
        self.delivered_turns: set[str] = set()
        self.sealed = False
        self._recorder = recorder
        self.bodies = Bodies()
        self._continuity = Continuity()
        self._prompts = Prompts(self.tree)
        self._gate = gate
        self._in_thread = in_thread
        self._retry_delays = retry_delays
        self._calls: dict[bytes, Call] = {}
        self._tasks: set[asyncio.Task[Told]] = set()
        self._told: dict[bytes, Told] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._claimed = 0
        self._slots = asyncio.Semaphore(limits.concurrent)
        self._journal = asyncio.Lock()
        self._opened_monotonic = time.monotonic()

    # -- the agent's side ---------------------------------------------------------------------------------------

    def call(self, request: ChatRequest, call_prefix: str) -> Call | Told:
        """Start, join or replay the call for `request`. Raises `WireError` when the session refuses it."""
        match = self._continuity.match(request.messages, request.tools)
        identity = digest(match.key, call_prefix, request.branch, str(request.max_tokens), request.model)
        if (call := self._calls.get(identity)) is not None:
            self.counters.joined += 1
            return call
        if not self.sealed and (told := self._told.get(identity)) is not None and self._repeats(told, request):
            self.counters.replayed += 1
            return told
        self._check_limits()
        kind = "msg_" if call_prefix == "toolu_" else "chatcmpl-"
        head = Head(f"{kind}{secrets.token_hex(12)}", request.model or self.policy.model, 0, int(time.time()))
        call = Call(head, asyncio.get_running_loop().create_future())
        call.task = asyncio.create_task(self._run(request, match, identity, call_prefix, call))
        call.abandon = lambda: self._abandon(identity, call)
        self._calls[identity] = call
        self._tasks.add(call.task)
        call.task.add_done_callback(lambda task: self._ended(identity, call, task))
        return call

    async def count_tokens(self, request: ChatRequest) -> int:
        """Exact number of prompt tokens `request` would be sampled from."""
        prompt, _ = await self._prompt(self._continuity.match(request.messages, request.tools), request)
        return len(prompt)

    @contextlib.contextmanager
    def delivering(self, turn_id: str) -> Iterator[None]:
        """Around the writing of a turn's last bytes. It is delivered unless the connection breaks here.

        The mark is set first, since the client may act on the last byte before the writer gets to say that it is out.
        """
        first = turn_id not in self.delivered_turns
        self.delivered_turns.add(turn_id)
        try:
            yield
        except BaseException:
            if first:
                self.delivered_turns.discard(turn_id)
            raise
        if first:
            record = asyncio.create_task(self._record(self._recorder.delivered, turn_id))
            self._notes.add(record)
            record.add_done_callback(self._notes.discard)

    # -- the control side ---------------------------------------------------------------------------------------

    async def seal(self, timeout: float) -> None:
        """Refuse what comes from now on, abort what is in flight at the engine, wait for it (bounded). Idempotent."""
        self.sealed = True
        for task in self._tasks:
            task.cancel()
        if waiting := {*self._tasks, *self._notes}:
            await asyncio.wait(waiting, timeout=timeout)

    async def record_seal(self, detail: Mapping[str, Any]) -> None:
        """Close the session's journal with its outcome."""
        await self._record(self._recorder.sealed, detail)

    def recorded_turns(self) -> list[Turn]:
        """All turns in the order they were recorded, each with whether it was delivered."""
        return [replace(turn, delivered=turn.id in self.delivered_turns) for turn in self.turns]

    @property
    def sampling(self) -> int:
        """Calls that are at the engine or being recorded right now."""
        return self._claimed

    async def note(self, kind: str, **detail: Any) -> None:
        """Put a fact that is no turn into the journal."""
        await self._record(self._recorder.event, kind, detail)

    # -- one call -----------------------------------------------------------------------------------------------

    async def _run(self, request: ChatRequest, match: Match, identity: bytes, call_prefix: str, call: Call) -> Told:
        try:
            async with self._slots:
                prompt, new_ids = await self._prompt(match, request)
                room = self.policy.max_context - len(prompt)
                if room <= 0:
                    raise ContextOverflowError(len(prompt), self.policy.max_context)
                self._check_limits()  # rendering took time: the session may have been sealed meanwhile
                call.prepared.set_result(len(prompt))
                self._claimed += 1  # from here on this call counts against the limit of turns
                try:
                    async with self._gate() as version:
                        sampling = self.policy.sampling.capped(min([room, *self._token_caps(request)]))
                        generation = await self._generate(prompt, sampling, call.head.id)
                    asked = _Asked(request, match, identity, call_prefix, call.head, prompt, new_ids, sampling, version)
                    commit = asyncio.ensure_future(self._commit(asked, generation))
                    while not commit.done():  # the turn exists or does not exist as a whole, whoever goes away
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.shield(commit)
                    return commit.result()
                finally:
                    self._claimed -= 1
        except asyncio.CancelledError:
            if self.sealed:
                raise WireError("budget", _SEALED) from None
            self.counters.abandoned += 1
            raise
        except ContextOverflowError as error:
            self.counters.stopped_by = "context"
            await self.note("context_overflow", prompt_tokens=error.prompt_tokens, limit=error.limit)
            raise WireError("context_overflow", str(error)) from error
        except EngineError as error:
            self.counters.engine_error = str(error)
            await self.note("engine_error", error=str(error), retryable=error.retryable)
            raise WireError("overloaded" if error.retryable else "invalid_request", str(error)) from error
        except (WireError, SandlotError):
            raise
        except Exception as error:
            # A full disk or a bug of ours: the agent may ask again, and the episode knows that it was not its doing.
            log.exception("session %s: a call failed inside the gateway", self.id)
            self.counters.engine_error = f"the gateway failed: {type(error).__name__}: {error}"
            raise WireError("overloaded", self.counters.engine_error) from error

    async def _generate(self, prompt: PromptIds, sampling: SamplingParams, request_id: str) -> Generation:
        """Ask the engine; a failure that may pass is tried again here, since agents give up after seconds."""
        for delay in (*self._retry_delays, None):
            try:
                return await self.policy.engine.generate(prompt, sampling, request_id=request_id, session_id=self.id)
            except EngineError as error:
                if delay is None or not error.retryable:
                    raise
                await self.note("engine_retry", error=str(error), delay=delay)
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")

    async def _prompt(self, match: Match, request: ChatRequest) -> tuple[PromptIds, Ids]:
        """Ids of the whole prompt, and of its part after the continued turn."""
        fmt = self.policy.format
        if match.turn is not None and fmt.can_extend:
            output = self.tree[match.turn].output_ids.tolist()
            names = self._call_names(match.turn)
            tail = await self._in_thread(fmt.extend, output, names, match.new, request.tools)
            if tail is not None:
                new = ids_array(tail)
                return self._prompts.continued(match.turn, new), new
        whole = ids_array(await self._in_thread(fmt.render, request.messages, request.tools))
        return PromptIds(whole), whole

    async def _commit(self, asked: _Asked, generation: Generation) -> Told:
        policy, output = self.policy, list(generation.output_ids)
        request, match, prompt = asked.request, asked.match, asked.prompt
        cut = generation.finish_reason == "length"
        reply = await self._in_thread(lambda: policy.format.parse(output, prompt, request.callable, truncated=cut))
        turn_id = secrets.token_hex(10)
        sent = [c for c in reply.calls if c.status in SENT_STATUSES]
        call_ids = tuple(f"{asked.call_prefix}{turn_id}_{k}" for k in range(len(sent)))
        signature = base64.b64encode(f"sandlot:{turn_id}".encode()).decode()
        extends = len(asked.new_ids) < len(prompt)
        declined = match.turn is not None and policy.format.can_extend and not extends
        turn = Turn(
            id=turn_id,
            parent=match.turn if extends else None,
            shared=self.tree[match.turn].length if extends and match.turn is not None else 0,
            new_ids=asked.new_ids,
            output_ids=ids_array(output),
            logprobs=np.asarray(generation.logprobs, dtype=np.float64),
            finish_reason=generation.finish_reason,
            prompt_sha256=ids_sha256(prompt.array),
            prompt_length=len(prompt),
            versions=tuple((s.version, s.start, s.end) for s in generation.versions)
            or ((asked.version, 0, len(output)),),
            sampling=asked.sampling.as_dict(),
            logprobs_mode=policy.logprobs_mode,
            model=policy.model,
            created=time.time(),
            request_sha256=asked.identity.hex(),
            branch=request.branch,
            fork=match.fork or (_DECLINED if declined else ""),
            parse=tuple(c.status for c in reply.calls),
            metadata={"ambiguous": True} if reply.ambiguous else {},
        )
        await self._record(self._recorder.turn, turn)
        self.tree.add(turn)
        self._prompts.keep(turn, prompt)
        self.turns.append(turn)
        if turn.fork:
            self.forks.append((turn_id, turn.fork))
        # A call that was cut off is told as text: a reply without any visible part would be dropped by some clients.
        unclosed = "".join(c.raw for c in reply.calls if c.status == "unclosed")
        text = reply.text + unclosed
        told_message = Message(
            "assistant",
            text,
            reply.reasoning,
            tuple(ToolCall(c.name, c.arguments, i) for c, i in zip(sent, call_ids, strict=True)),
        )
        statuses = tuple(c.status for c in sent)
        self._continuity.record(match, turn_id, told_message, (*call_ids, signature), statuses)
        self._count(generation, prompt, turn)
        told_reply = replace(reply, text=text, calls=tuple(sent), truncated=reply.truncated or cut)
        finish: Literal["stop", "tool_calls", "length"] = (
            "length" if told_reply.truncated else "tool_calls" if sent else "stop"
        )
        answer = Answer(
            replace(asked.head, prompt_tokens=len(prompt)), told_reply, call_ids, signature, finish, len(output)
        )
        told = Told(turn_id, answer)
        self._told[asked.identity] = told
        return told

    # -- small parts --------------------------------------------------------------------------------------------

    def _repeats(self, told: Told, request: ChatRequest) -> bool:
        """Whether this request asks for an answer that its client never got, rather than for another sample."""
        if told.turn_id not in self.delivered_turns:
            return True
        return request.marked_retry and not self._continuity.continued(told.turn_id)

    def _abandon(self, identity: bytes, call: Call) -> None:
        """Cancel a call that nobody waits for. The same request after this must not join it."""
        self._forget(identity, call)
        call.task.cancel()

    def _forget(self, identity: bytes, call: Call) -> None:
        if self._calls.get(identity) is call:
            del self._calls[identity]

    def _ended(self, identity: bytes, call: Call, task: asyncio.Task[Told]) -> None:
        self._tasks.discard(task)
        self._forget(identity, call)
        if call.prepared.done():
            return
        if task.cancelled():
            call.prepared.cancel()
        elif error := task.exception():
            call.prepared.set_exception(error)
            call.prepared.exception()  # mark as seen: its waiters may all be gone

    def _check_limits(self) -> None:
        limits, counters = self.limits, self.counters
        if self.sealed:
            raise WireError("budget", _SEALED)
        spent = ""
        if limits.turns is not None and counters.turns + self._claimed >= limits.turns:
            spent = f"turns ({limits.turns})"
        elif limits.tokens is not None and counters.sampled_tokens >= limits.tokens:
            spent = f"sampled tokens ({limits.tokens})"
        elif limits.wall_clock is not None and time.monotonic() - self._opened_monotonic >= limits.wall_clock:
            spent = f"wall clock ({limits.wall_clock:g} s)"
        if spent:
            counters.stopped_by = spent
            raise WireError("budget", f"the budget of this session is spent: {spent}; finish now, do not retry")

    def _token_caps(self, request: ChatRequest) -> Sequence[int]:
        caps = [c for c in (request.max_tokens, self.policy.sampling.max_tokens) if c is not None]
        if self.limits.tokens is not None:
            caps.append(self.limits.tokens - self.counters.sampled_tokens)
        return [max(1, c) for c in caps]

    def _call_names(self, turn_id: str) -> list[str]:
        told = self._continuity.told(turn_id)
        return [c.name for c in told.tool_calls]

    def _count(self, generation: Generation, prompt: PromptIds, turn: Turn) -> None:
        counters = self.counters
        counters.turns += 1
        counters.sampled_tokens += len(generation.output_ids)
        counters.prompt_tokens += len(prompt)
        counters.engine_error = ""
        for status in turn.parse:
            counters.calls[status] = counters.calls.get(status, 0) + 1

    async def _record(self, write: Callable[..., None], *args: Any) -> None:
        async with self._journal:
            await self._in_thread(write, *args)
