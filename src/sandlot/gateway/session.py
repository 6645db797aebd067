"""A session: all model calls of one episode, from canonical request to recorded turn.

One call goes: identity (join, replay or new) → limits → prompt ids by continuity → engine → parse → journal → told.
A turn exists once it is journaled, which is before the agent sees its last byte; a call that nobody waits for any
more before that leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from typing import Any

from sandlot.chat.continuity import Continuity, Match
from sandlot.chat.messages import digest
from sandlot.engine.base import Generation, SamplingParams
from sandlot.errors import ContextOverflowError, EngineError, ModelError
from sandlot.gateway.admission import Held
from sandlot.gateway.answering import Taken, take
from sandlot.gateway.bodies import Bodies
from sandlot.gateway.call import Asked, Call, Counters, Policy, Recorder, Told
from sandlot.gateway.clock import Clock, OutOfTimeError
from sandlot.gateway.deliveries import Deliveries
from sandlot.gateway.ledger import Ledger
from sandlot.gateway.limits import SessionLimits
from sandlot.gateway.prompts import Prompts
from sandlot.gateway.share import Share
from sandlot.gateway.spending import Spending
from sandlot.gateway.wire.base import ChatRequest, Head, Stored, WireError
from sandlot.gateway.wire.values import check_messages
from sandlot.ids import Ids, PromptIds
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Turn

log = logging.getLogger(__name__)
_DENSE = 16
"""Characters that a token stands for at most in the mean of a long text; four are usual."""
_SMALL_TEXT = 1_000_000
"""Characters that are encoded and counted in any case."""
_SHORT_ANSWER = 2_000
"""Sampled tokens up to which an answer is parsed on the event loop."""
_WAITING = 16
"""Calls that may be there for each that may be at the engine: prompts that wait take memory."""
_LONGEST_DELAY_S = 60.0
"""How long a call waits at most before it is tried again, whatever the engine asks for."""
_LAST_BYTES_S = 2.0
"""How long a sealed session waits for answers that are being written."""
_SEALED = "this session is sealed; no more calls are answered"


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
        admit: Callable[[int, Held], AbstractAsyncContextManager[None]],
        in_thread: Callable[..., Awaitable[Any]],
        in_writer: Callable[..., Awaitable[Any]] | None = None,
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
        self.sealed = False
        self._ledger = Ledger(recorder, in_writer or in_thread)
        self.delivered_turns = Deliveries(self._ledger.delivered)
        self.bodies = Bodies()
        self.share = Share(in_thread)
        self._continuity = Continuity()
        self._prompts = Prompts(policy.format, self.tree, self.share.run)
        self._gate = gate
        self._admit = admit
        self._in_thread = in_thread
        self._retry_delays = retry_delays
        self._calls: dict[bytes, Call] = {}
        self._tasks: set[asyncio.Task[Told]] = set()
        self._told: dict[bytes, Told] = {}
        self._stored: dict[str, Stored] = {}
        self._claimed = 0
        self._slots = asyncio.Semaphore(limits.concurrent)
        self._spending = Spending(limits.tokens, self.counters)
        self._recording = asyncio.Lock()
        self.clock = Clock(limits.wall_clock)

    # -- the agent's side ---------------------------------------------------------------------------------------

    def call(self, request: ChatRequest, call_prefix: str) -> Call | Told:
        """Start, join or replay the call for `request`. Raises `WireError` when the session refuses it."""
        try:
            match = self._match(request)
        except WireError:
            self.counters.stopped_by = "context"
            raise
        identity = digest(match.key, call_prefix, request.branch, str(request.max_tokens), request.model)
        if (call := self._calls.get(identity)) is not None:
            self.counters.joined += 1
            return call
        if not self.sealed and (told := self._told.get(identity)) is not None and self._repeats(told, request):
            self.counters.replayed += 1
            return told
        self._check_limits()
        if len(self._tasks) >= (most := _WAITING * self.limits.concurrent):
            raise WireError("overloaded", f"overloaded: {most} calls of this session wait already; try again")
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
        try:
            prompt, _ = await self._prompt(self._match(request), request)
        except ModelError as error:
            raise WireError("invalid_request", str(error)) from error
        return len(prompt)

    def recall(self, answer_id: str) -> Stored | None:
        """The conversation up to an answer, where its request let it be stored."""
        return self._stored.get(answer_id)

    def delivering(self, turn_id: str) -> AbstractContextManager[None]:
        """Around the writing of a turn's last bytes. It is delivered unless the connection breaks here."""
        return self.delivered_turns.writing(turn_id)

    # -- the control side ---------------------------------------------------------------------------------------

    async def seal(self, timeout: float) -> None:
        """Refuse what comes from now on, abort what is in flight at the engine, wait for it (bounded). Idempotent."""
        self.sealed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        await self.delivered_turns.close(min(timeout, _LAST_BYTES_S))
        if writing := self._ledger.flush():
            await asyncio.wait(writing, timeout=timeout)

    async def record_seal(self, detail: Mapping[str, Any]) -> None:
        """Close the session's journal with its outcome."""
        await self._ledger.run(self._ledger.recorder.sealed, detail)

    async def close(self) -> None:
        """Record nothing more."""
        await self._ledger.run(self._ledger.recorder.close)

    def recorded_turns(self) -> list[Turn]:
        """All turns in the order they were recorded, each with whether it was delivered."""
        return [replace(turn, delivered=turn.id in self.delivered_turns) for turn in self.turns]

    def in_time(self) -> AbstractAsyncContextManager[None]:
        """Around what ends with the session's time, by `OutOfTimeError`."""
        return self.clock.within(self._out_of_time)

    @property
    def sampling(self) -> int:
        """Calls that are at the engine or being recorded right now."""
        return self._claimed

    async def note(self, kind: str, **detail: Any) -> None:
        """Put a fact that is no turn into the journal."""
        await self._ledger.run(self._ledger.recorder.event, kind, detail)

    # -- one call -----------------------------------------------------------------------------------------------

    async def _run(self, request: ChatRequest, match: Match, identity: bytes, call_prefix: str, call: Call) -> Told:
        try:
            prompt, new_ids = await self._prompt(match, request)
            room = self.policy.max_context - len(prompt)
            if room <= 0:
                raise ContextOverflowError(len(prompt), self.policy.max_context)
            self._check_limits()  # rendering took time: the session may have been sealed meanwhile
            call.prepared.set_result(len(prompt))  # before it waits for others, so that its client is kept alive
            async with self._slots, self._spending.hold(self._most(request, room)) as most:
                self._check_limits()
                self._claimed += 1  # from here on this call counts against the limit of turns
                try:
                    sampling = self.policy.sampling.capped(most)
                    async with self.in_time(), self._admit(len(prompt), self.clock.held), self._gate() as version:
                        generation = await self._generate(prompt, sampling, call.head.id)
                    asked = Asked(request, match, identity, call_prefix, call.head, prompt, new_ids, sampling, version)
                    call.kept = True
                    commit = asyncio.ensure_future(self._commit(asked, generation))
                    while not commit.done():  # the turn exists or does not exist as a whole, whoever goes away
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.shield(commit)
                    told = commit.result()
                    if self.sealed:
                        raise WireError("budget", _SEALED)
                    return told
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
        except OutOfTimeError:
            raise _spent(self._wall_clock) from None
        except WireError:
            raise
        except ModelError as error:  # the model's chat template refuses this conversation
            raise WireError("invalid_request", str(error)) from error
        except Exception as error:
            # A full disk or a bug of ours: the agent may ask again, and the episode knows that it was not its doing.
            log.exception("session %s: a call failed inside the gateway", self.id)
            self.counters.engine_error = f"the gateway failed: {type(error).__name__}: {error}"
            raise WireError("overloaded", self.counters.engine_error) from error

    async def _generate(self, prompt: PromptIds, sampling: SamplingParams, request_id: str) -> Generation:
        """Ask the engine; a failure that may pass is tried again here, since agents give up after seconds."""
        engine = self.policy.engine
        for delay in (*self._retry_delays, None):
            began = time.monotonic()
            try:
                generation = await engine.generate(prompt, sampling, request_id=request_id, session_id=self.id)
                if generation.lost_s:
                    self.clock.failed(time.monotonic() - generation.lost_s)
                self.clock.served()
                return generation
            except EngineError as error:
                self.clock.failed(began)
                if delay is None or not error.retryable:
                    raise
                delay = max(delay, min(error.retry_after, _LONGEST_DELAY_S))
                await self.note("engine_retry", error=str(error), delay=delay)
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")

    async def _prompt(self, match: Match, request: ChatRequest) -> tuple[PromptIds, Ids]:
        """Ids of the whole prompt, and of its part after the continued turn."""
        calls = self._continuity.told(match.turn).tool_calls if match.turn is not None else ()
        return await self._prompts.of(match, request, [call.name for call in calls])

    async def _commit(self, asked: Asked, generation: Generation) -> Told:
        async with self._recording:  # one at a time: why a turn forks depends on those before it
            if (fork := self._continuity.fork(asked.match)) != asked.match.fork:
                asked = replace(asked, match=replace(asked.match, fork=fork))
            return await self._record(asked, generation)

    async def _record(self, asked: Asked, generation: Generation) -> Told:
        proof = self._prompts.hashed(asked.continued, asked.prompt)
        if len(generation.output_ids) <= _SHORT_ANSWER:
            taken = self._take(asked, generation, proof.hexdigest())
        else:
            taken = await self._in_thread(self._take, asked, generation, proof.hexdigest())
        turn = taken.turn
        await self._ledger.run(self._ledger.recorder.turn, turn)
        self.tree.add(turn)
        self._prompts.keep(turn, asked.prompt, proof)
        self.turns.append(turn)
        if turn.fork:
            self.forks.append((turn.id, turn.fork))
        self._continuity.record(asked.match, turn.id, taken.message, taken.statuses)
        self._count(turn)
        self._told[asked.identity] = taken.told
        request = asked.request
        if (messages := request.stored) is not None:
            before = request.earlier
            since = messages[len(before.messages) :] if before else messages
            kept = Stored((*since, taken.message), request.found, request.tools, request.deferred, before)
            self._stored[asked.head.id] = kept
        return taken.told

    def _take(self, asked: Asked, generation: Generation, prompt_sha256: str) -> Taken:
        """What was sampled, parsed."""
        cut = generation.finish_reason == "length"
        fmt, tools = self.policy.format, asked.request.callable
        reply = fmt.parse(list(generation.output_ids), asked.prompt, tools, truncated=cut)
        shared = self.tree[asked.continued].length if asked.continued is not None else 0
        return take(asked, generation, reply, self.policy, shared, prompt_sha256)

    def _match(self, request: ChatRequest) -> Match:
        """What a request continues. One that cannot fit is refused before it is encoded, which takes a few hundred
        times its memory: a text by its characters, of which `_DENSE` are then told as one token."""
        most = self.policy.max_context
        least = len(request.messages) + len(request.tools)  # a message is a token at least, and so is a tool
        check_messages(least)
        if request.size > (dense := max(_DENSE * most, _SMALL_TEXT)):
            count = sum(message.size for message in request.messages) + sum(tool.size for tool in request.tools)
            if count > dense:
                least = count // _DENSE + 1
        if least > most:
            raise WireError("context_overflow", str(ContextOverflowError(least, most)))
        return self._continuity.match(request.messages, request.tools)

    # -- small parts --------------------------------------------------------------------------------------------

    def _repeats(self, told: Told, request: ChatRequest) -> bool:
        """Whether this request asks for an answer that its client never got, rather than for another sample."""
        if told.turn_id not in self.delivered_turns:
            return True
        return request.marked_retry and not self._continuity.continued(told.turn_id)

    def _abandon(self, identity: bytes, call: Call) -> None:
        """Cancel a call that nobody waits for. The same request after this must not join it."""
        if self.clock.standing:  # an agent that gives up for good now has not failed
            self.counters.engine_error = "it did not serve a call until its client left"
        self._forget(identity, call)
        call.task.cancel()

    def _forget(self, identity: bytes, call: Call) -> None:
        if self._calls.get(identity) is call:
            del self._calls[identity]

    def _ended(self, identity: bytes, call: Call, task: asyncio.Task[Told]) -> None:
        self._tasks.discard(task)
        self._forget(identity, call)
        call.abandon = _nothing  # it refers to the call and to this session, which would keep each other
        error = None if task.cancelled() else task.exception()  # seen by that: its waiters may all be gone
        if call.prepared.done():
            return
        if error is None:
            call.prepared.cancel()
        else:
            call.prepared.set_exception(error)
            call.prepared.exception()

    def _check_limits(self) -> None:
        limits, counters = self.limits, self.counters
        if self.sealed:
            raise WireError("budget", _SEALED)
        spent = ""
        if limits.turns is not None and counters.turns + self._claimed >= limits.turns:
            spent = f"turns ({limits.turns})"
        elif limits.tokens is not None and counters.sampled_tokens >= limits.tokens:
            spent = f"sampled tokens ({limits.tokens})"
        elif self.clock.left <= 0:
            spent = self._wall_clock
        if spent:
            counters.stopped_by = spent
            raise _spent(spent)

    def _out_of_time(self) -> None:
        if self._claimed:
            self.counters.stopped_by = self._wall_clock
        if self.clock.worn:
            self.counters.engine_error = f"it did not serve this session for {self.clock.stood:.0f} s"

    @property
    def _wall_clock(self) -> str:
        return f"wall clock ({self.limits.wall_clock:g} s)"

    def _most(self, request: ChatRequest, room: int) -> int:
        """How many tokens a request may be answered with at most."""
        caps = (request.max_tokens, self.policy.sampling.max_tokens)
        return min([room, *(max(1, cap) for cap in caps if cap is not None)])

    def _count(self, turn: Turn) -> None:
        counters = self.counters
        counters.turns += 1
        counters.sampled_tokens += len(turn.output_ids)
        counters.prompt_tokens += turn.prompt_length
        counters.engine_error = ""
        for status in turn.parse:
            counters.calls[status] = counters.calls.get(status, 0) + 1


def _spent(what: str) -> WireError:
    return WireError("budget", f"the budget of this session is spent: {what}; finish now, do not retry")


def _nothing() -> None: ...
