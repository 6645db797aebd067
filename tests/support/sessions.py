"""Random sessions for the trajectory tests: turns with true prompts, and slow, obvious answers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sandlot.ids import ids_array
from sandlot.trajectory.turn import Turn, ids_sha256

Tokens = tuple[int, ...]


def make_turn(
    turn_id: str,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    parent: str | None = None,
    shared: int = 0,
    logprobs: Sequence[float] | None = None,
    **fields: Any,
) -> Turn:
    """A turn whose prompt is given whole."""
    values: dict[str, Any] = {
        "finish_reason": "stop",
        "versions": (("v1", 0, len(output)),),
        "sampling": {"temperature": 1.0},
        "logprobs_mode": "processed",
        "model": "policy",
        "created": 1.5,
        "delivered": True,
        **fields,
    }
    return Turn(
        id=turn_id,
        parent=parent,
        shared=shared,
        new_ids=ids_array(prompt[shared:]),
        output_ids=ids_array(output),
        logprobs=np.array(logprobs if logprobs is not None else [-(k + 1) / 7 for k in range(len(output))]),
        prompt_sha256=ids_sha256(ids_array(prompt)),
        prompt_length=len(prompt),
        **values,
    )


class SessionBuilder:
    """Builds a session turn by turn, remembering every prompt and sequence in full."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.prompts: dict[str, Tokens] = {}
        self.full: dict[str, Tokens] = {}

    def add(self, prompt: Sequence[int], output: Sequence[int], **fields: Any) -> Turn:
        turn = make_turn(f"t{len(self.turns)}", tuple(prompt), tuple(output), **fields)
        self.turns.append(turn)
        self.prompts[turn.id] = tuple(prompt)
        self.full[turn.id] = (*prompt, *output)
        return turn

    def root(self, prompt: Sequence[int], output: Sequence[int], **fields: Any) -> Turn:
        return self.add(prompt, output, **fields)

    def follow(self, before: Turn, new: Sequence[int], output: Sequence[int], **fields: Any) -> Turn:
        """A turn that continues the whole of `before`."""
        return self.add(self.full[before.id] + tuple(new), output, parent=before.id, shared=before.length, **fields)

    def fork(self, before: Turn, shared: int, new: Sequence[int], output: Sequence[int], **fields: Any) -> Turn:
        """A turn that shares only the first `shared` tokens of `before`."""
        prompt = self.full[before.id][:shared] + tuple(new)
        return self.add(prompt, output, parent=before.id, shared=shared, fork="history edited", **fields)


def long_chain(turns: int, *, new: int = 3, output: int = 2, head: int = 5) -> SessionBuilder:
    """A session of one conversation, every token different from its neighbours."""
    counter = iter(range(10**9))
    take = lambda n: tuple(next(counter) % 50_000 for _ in range(n))  # noqa: E731
    builder = _Deltas()
    turn = builder.first(take(head), take(output))
    for _ in range(turns - 1):
        turn = builder.next(turn, take(new), take(output))
    return builder


class _Deltas(SessionBuilder):
    """Long chains without keeping every sequence in full."""

    def first(self, prompt: Tokens, output: Tokens) -> Turn:
        self._sequence = bytearray()
        return self._push(None, 0, prompt, output)

    def next(self, before: Turn, new: Tokens, output: Tokens) -> Turn:
        return self._push(before.id, before.length, new, output)

    def _push(self, parent: str | None, shared: int, new: Tokens, output: Tokens) -> Turn:
        self._sequence += ids_array(new).astype("<i4").tobytes()
        whole = np.frombuffer(bytes(self._sequence), dtype="<i4")
        turn = replace(
            make_turn(f"t{len(self.turns)}", new, output),
            parent=parent,
            shared=shared,
            prompt_sha256=ids_sha256(whole),
            prompt_length=len(whole),
        )
        self._sequence += ids_array(output).astype("<i4").tobytes()
        self.turns.append(turn)
        return turn


# --- random sessions -------------------------------------------------------------------------------------------------

ODD_IDS = (0, 1, 2, 2**31 - 1)
_token = st.sampled_from((*ODD_IDS, 7))
_tokens = st.lists(_token, max_size=4).map(tuple)
_output = st.lists(_token, min_size=1, max_size=4).map(tuple)
_logprob = st.one_of(
    st.sampled_from((0.0, -0.0, -1e-300, -5e-324, -0.1, -1 / 3, -9998.5)),
    st.floats(min_value=-100.0, max_value=0.0, allow_nan=False),
)


@dataclass(frozen=True)
class _Step:
    """One request of a random session, in terms of what is there already."""

    kind: str
    pick: int
    cut: float
    new: Tokens
    output: Tokens
    same_output: bool
    logprobs: tuple[float, ...]
    declared: str
    declared_pick: int
    declared_cut: float
    delivered: bool
    length: bool
    versions: int
    branch: str


_steps = st.builds(
    _Step,
    kind=st.sampled_from(("follow", "follow", "follow", "fork", "retry", "root", "compact")),
    pick=st.integers(0, 30),
    cut=st.floats(0, 1),
    new=_tokens,
    output=_output,
    same_output=st.booleans(),
    logprobs=st.tuples(*[_logprob] * 4),
    declared=st.sampled_from(("true", "true", "none", "partial")),
    declared_pick=st.integers(0, 30),
    declared_cut=st.floats(0, 1),
    delivered=st.sampled_from((True, True, True, False)),
    length=st.booleans(),
    versions=st.integers(1, 2),
    branch=st.sampled_from(("main", "subagent:a", "side")),
)


def _apply(builder: SessionBuilder, step: _Step) -> None:
    turns = builder.turns
    before = turns[-1 - step.pick % len(turns)] if turns else None
    output = step.output
    if before is None or step.kind == "root":
        prompt: Tokens = step.new or (7,)
        before = None
    elif step.kind == "follow":
        prompt = builder.full[before.id] + step.new
    elif step.kind == "retry":
        prompt = builder.prompts[before.id]
        output = tuple(before.output_ids.tolist()) if step.same_output else output
    else:
        source = builder.prompts[before.id] if step.kind == "compact" else builder.full[before.id]
        prompt = source[: int(step.cut * len(source))] + step.new or (7,)
    parent, shared = None, 0
    if step.declared == "true" and before is not None and step.kind == "follow":
        parent, shared = before.id, before.length
    elif step.declared != "none" and turns:
        other = turns[step.declared_pick % len(turns)]
        common = common_prefix(builder.full[other.id], prompt)
        parent = other.id
        shared = common if step.declared == "true" else int(step.declared_cut * common)
    middle = len(output) // 2
    split = step.versions == 2 and middle > 0
    builder.add(
        prompt,
        output,
        parent=parent,
        shared=shared,
        logprobs=step.logprobs[: len(output)],
        delivered=step.delivered,
        finish_reason="length" if step.length else "stop",
        versions=(("v1", 0, middle), ("v2", middle, len(output))) if split else (("v1", 0, len(output)),),
        branch=step.branch,
        fork="" if parent is not None else f"new root {len(turns)}",
    )


@st.composite
def sessions(draw: st.DrawFn, *, min_turns: int = 0, max_turns: int = 14) -> SessionBuilder:
    """Forks, interleaved sub-agents, compactions, side calls, retries, undelivered turns; a tiny vocabulary so that
    sequences coincide by accident all the time."""
    builder = SessionBuilder()
    for step in draw(st.lists(_steps, min_size=min_turns, max_size=max_turns)):
        _apply(builder, step)
    return builder


# --- slow, obvious answers -------------------------------------------------------------------------------------------


def common_prefix(a: Tokens, b: Tokens) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def oracle_parents(builder: SessionBuilder) -> dict[str, str | None]:
    """Token parents by comparing every turn with every earlier one."""
    parents: dict[str, str | None] = {}
    for k, turn in enumerate(builder.turns):
        best: Turn | None = None
        for earlier in builder.turns[:k]:
            whole = builder.full[earlier.id]
            if turn.parent == earlier.id and turn.shared == len(whole):
                best = earlier
                break
            if builder.prompts[turn.id][: len(whole)] == whole and (best is None or len(whole) >= best.length):
                best = earlier
        parents[turn.id] = best.id if best else None
    return parents


def oracle_kept(builder: SessionBuilder) -> set[str]:
    continued = set(oracle_parents(builder).values())
    return {t.id for t in builder.turns if t.delivered or t.id in continued}


def oracle_rows(builder: SessionBuilder, max_tokens: int | None = None) -> list[tuple[Tokens, list[int], list[str]]]:
    """(tokens, mask, trained turn ids) of every row."""
    parents = oracle_parents(builder)
    continued = {builder.prompts[t.id] for t in builder.turns if t.id in parents.values()}
    fitting = [
        t for t in builder.turns if t.id in oracle_kept(builder) and (max_tokens is None or t.length <= max_tokens)
    ]
    leaves = [t for t in fitting if not any(parents[other.id] == t.id for other in fitting)]
    paths: dict[str, list[str]] = {}
    for leaf in leaves:
        path, at = [], leaf.id
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        paths[leaf.id] = path

    def abandoned(leaf: Turn) -> bool:
        return leaf.id not in parents.values() and builder.prompts[leaf.id] in continued

    def trainer(turn: Turn) -> Turn:
        """The first leaf below it; rather one not abandoned, then one of its own branch, then one not cut."""
        below = [leaf for leaf in leaves if turn.id in paths[leaf.id]]
        return min(below, key=lambda x: (abandoned(x), x.branch != turn.branch, x.finish_reason == "length"))

    rows = []
    for leaf in leaves:
        own = [t.id for t in builder.turns if t.id in paths[leaf.id] and trainer(t) is leaf]
        tokens = builder.full[leaf.id]
        mask = [0] * len(tokens)
        for i in own:
            for k in range(len(builder.prompts[i]), len(builder.full[i])):
                mask[k] = 1
        rows.append((tokens, mask, own))
    return rows
