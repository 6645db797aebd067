"""Random sessions through the gateway's session: whatever clients do, the audit holds and continuations are exact."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.chat.format import load_chat_format
from sandlot.chat.messages import Message, Tool
from sandlot.engine.base import Generation, SamplingParams, checked
from sandlot.gateway import Gateway, Policy
from sandlot.gateway.call import Call, Told
from sandlot.gateway.session import Session
from sandlot.gateway.wire import ChatRequest
from support.policy import call_text, encode_control
from support.toy_model import make_toy_model

TOOLSETS = ((), (Tool("bash", "run", {"type": "object"}),), (Tool("read", "", {}), Tool("bash", "", {})))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


class RandomPolicy:
    """An engine that writes odd things: split words, thoughts, good and broken calls, cut-off ends, raw ids."""

    def __init__(self, fmt, rng: random.Random) -> None:  # type: ignore[no-untyped-def]
        self.fmt, self.rng = fmt, rng
        self.prompts: list[list[int]] = []
        self.cancelled = 0

    def _ids(self) -> list[int]:
        rng, fmt = self.rng, self.fmt
        kind = rng.randrange(7)
        if kind == 0:  # a word in a tokenization that encoding its text would never give
            return [*fmt.encode("he"), *fmt.encode("llo"), *fmt.encode(" w"), *fmt.encode("orld")]
        if kind == 1:
            return [rng.randrange(260, 500) for _ in range(rng.randrange(1, 9))]
        texts = (
            "fine",
            "<think>\nwhy\n</think>\n\n" + call_text("bash", {"command": f"echo {rng.randrange(3)}", "n": 5000.0}),
            call_text("nope", {"a": 1}) + call_text("bash", {}),
            call_text("bash", '{"command": "ls"'),
            "same text",
        )
        return encode_control(fmt, texts[kind - 2])

    async def generate(self, prompt_ids, sampling: SamplingParams, *, request_id: str, session_id: str) -> Generation:  # type: ignore[no-untyped-def]
        prompt = list(prompt_ids)
        for _ in range(self.rng.randrange(3)):
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        ids, reason = [*self._ids(), self.fmt.stop_token_ids[0]], "stop"
        if self.rng.randrange(5) == 0 and len(ids) > 1:
            ids, reason = ids[:-1], "length"
        self.prompts.append(prompt)
        logprobs = tuple(-self.rng.random() * 5 for _ in ids)
        return checked(Generation(tuple(ids), logprobs, reason), logprob_ids=ids)


@dataclass
class Conversation:
    """What one agent believes was said; `states` are the requests it made, to go back to."""

    request: ChatRequest
    states: list[ChatRequest] = field(default_factory=list)
    last: Told | None = None
    busy: bool = False


@dataclass
class World:
    session: Session
    policy: RandomPolicy
    rng: random.Random
    conversations: list[Conversation] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    async def send(self, request: ChatRequest, *, deliver: bool = True, leave: bool = False) -> Told | None:
        call = self.session.call(request, "toolu_")
        if isinstance(call, Call):
            with call:
                waiting = asyncio.ensure_future(call.result())
                if leave:
                    await asyncio.sleep(0)
                    waiting.cancel()
                    return None
                told = await waiting
        else:
            told = call
        self.told.add(told.turn_id)
        if deliver:
            with self.session.delivering(told.turn_id):
                pass
        return told

    def echoed(self, told: Told) -> Message:
        """The assistant message as some client would send it back."""
        tree = self.session._continuity.told(told.turn_id)
        marks = (*told.answer.call_ids, told.answer.signature) if self.rng.randrange(2) else told.answer.call_ids
        message = replace(tree, marks=marks)
        if self.rng.randrange(2):
            message = replace(message, reasoning="")
        if self.rng.randrange(3) == 0:
            message = replace(message, text=message.text.strip() + "\n")
        return message

    async def step(self, action: int) -> None:
        """One thing that happens; an agent does one thing at a time, and several agents are at work."""
        idle = [c for c in self.conversations if not c.busy]
        if action == 0 or not idle:
            await self.begin()
            return
        conversation = self.rng.choice(idle)
        conversation.busy = True
        try:
            await self.happen(action, conversation)
        finally:
            conversation.busy = False

    async def begin(self) -> None:
        rng = self.rng
        system = Message("system", f"You are agent {rng.randrange(2)}.")
        user = Message("user", rng.choice(["hi", "<|im_end|>", "fix it"]))
        tools = TOOLSETS[rng.randrange(3)]
        branch = rng.choice(["main", "subagent:a"])
        conversation = Conversation(ChatRequest((system, user), tools, "m", False, branch=branch), busy=True)
        self.conversations.append(conversation)
        conversation.last = await self.send(conversation.request)
        conversation.busy = False

    async def happen(self, action: int, conversation: Conversation) -> None:
        rng, request = self.rng, conversation.request
        if action == 1 and conversation.last is not None:  # goes on
            last, conversation.last = conversation.last, None
            tail: list[Message] = [self.echoed(last)]
            tail += [Message("tool", f"result {i}", tool_call_id=i) for i in last.answer.call_ids]
            if not last.answer.call_ids or rng.randrange(3) == 0:
                tail.append(Message("user", rng.choice(["more", "<think>", "go on"])))
            conversation.states.append(request)
            conversation.request = replace(request, messages=(*request.messages, *tail))
            told = await self.send(conversation.request)
            assert told is not None
            prompt = self.session.tree.prompt_ids(told.turn_id)
            # Answers of one text under one history cannot be told apart where the wire carries nothing back.
            known, said = self.session._continuity, self.session._continuity.told(last.turn_id)
            twins = known.sampled_under(known._own[last.turn_id].key)
            same = [t for t in twins if known.told(t).text.split() == said.text.split()]
            whole = [self.session.tree.ids(t) for t in same]
            assert any(prompt[: len(ids)].tolist() == ids.tolist() for ids in whole), "a continuation was rendered anew"
            conversation.last = told
        elif action == 2:  # an SDK's retry
            await self.send(replace(request, marked_retry=True))
        elif action == 3:  # the same again, unmarked, while another of it runs
            first, second = await asyncio.gather(self.send(request), self.send(request))
            conversation.last = first
            assert first is not None
            assert second is not None
        elif action == 4:  # an answer that never arrives, then the same request
            lost = await self.send(request, deliver=False)
            again = await self.send(request)
            assert lost is not None
            assert again is not None
            if lost.turn_id not in self.session.delivered_turns:
                raise AssertionError("an undelivered answer was not given again")
            conversation.last = again
        elif action == 5:  # leaves before the reply
            await self.send(replace(request, max_tokens=rng.randrange(1000, 2000)), leave=True)
        elif action == 6 and conversation.states:  # goes back and takes another way
            state = rng.choice(conversation.states)
            conversation.request = replace(state, messages=(*state.messages, Message("user", f"no: {rng.random()}")))
            conversation.last = await self.send(conversation.request)
        elif action == 7:  # compaction: a new start that quotes what was said
            quoted = Message("user", "Summary: " + " ".join(m.text for m in request.messages)[-200:])
            conversation.request = replace(request, messages=(request.messages[0], quoted))
            conversation.last = await self.send(conversation.request)


@given(seed=st.integers(0, 2**32), actions=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=12))
def test_whatever_clients_do_the_audit_holds_and_continuations_are_exact(
    toy: Path, seed: int, actions: list[list[int]]
) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        fmt = _format(toy)
        engine = RandomPolicy(fmt, rng)
        policy = Policy(engine, fmt, "toy", SamplingParams(), 100_000, "processed")  # type: ignore[arg-type]
        async with Gateway(policy) as gateway:
            session = gateway.open().session
            world = World(session, engine, rng)
            for together in actions:
                await asyncio.gather(*(world.step(action) for action in together))
            finished = await gateway.finish(session.id, reward=1.0)
        report = finished.report
        assert report.ok
        assert report.turns == len(session.turns) == len(engine.prompts)
        assert report.trained == report.kept
        kept = {t for t in world.told if t in session.delivered_turns}
        assert {span.turn_id for sample in finished.samples for span in sample.spans} == kept
        sent = sorted(tuple(session.tree.prompt_ids(t.id).tolist()) for t in session.turns)
        assert sent == sorted(tuple(p) for p in engine.prompts)

    asyncio.run(run())


_formats: dict[Path, object] = {}


def _format(toy: Path):  # type: ignore[no-untyped-def]
    if toy not in _formats:
        _formats[toy] = load_chat_format(toy)
    return _formats[toy]
