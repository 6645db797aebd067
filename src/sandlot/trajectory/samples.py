"""From a session's turns to training rows: one per leaf of the token tree, every sampled token trained once."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sandlot.trajectory.sample import Sample, Span
from sandlot.trajectory.tree import SessionTree
from sandlot.trajectory.turn import Turn


def linearize(
    turns: Iterable[Turn],
    *,
    episode_id: str,
    group_id: str,
    reward: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[Sample]:
    """Samples of a session given by its turns in the order they were sampled; see `linearize_tree`."""
    return linearize_tree(
        SessionTree(turns),
        episode_id=episode_id,
        group_id=group_id,
        reward=reward,
        metadata=metadata,
        max_tokens=max_tokens,
    )


def linearize_tree(
    tree: SessionTree,
    *,
    episode_id: str,
    group_id: str,
    reward: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[Sample]:
    """One sample per leaf among the kept turns, in the order of the leaves' turns.

    A turn that several leaves share is trained in one row (`_owned`) and is context in the others. Turns that do not
    fit into `max_tokens` are left out whole, and the row that lost them has the status `truncated`. The metadata of a
    row is the session's plus: `turns` on its path, the `fork` reason where its own stretch begins, `abandoned` when
    another answer to the same prompt was continued instead, `cut` when later turns did not fit.
    """
    kept = kept_turns(tree)
    fitting = {i for i in kept if max_tokens is None or tree[i].length <= max_tokens}
    root_prompt: dict[str, int] = {}
    depth: dict[str, int] = {}
    for turn in tree:
        parent = tree.parent(turn.id)
        root_prompt[turn.id] = turn.prompt_length if parent is None else root_prompt[parent]
        depth[turn.id] = 1 if parent is None else depth[parent] + 1
    leaves = [t for t in tree if t.id in fitting and not any(child in fitting for child in tree.children(t.id))]
    continued = {(t.prompt_sha256, t.prompt_length) for t in tree if tree.children(t.id)}
    abandoned = {t.id for t in leaves if not tree.children(t.id) and (t.prompt_sha256, t.prompt_length) in continued}
    owned = _owned(tree, leaves, abandoned)
    samples: list[Sample] = []
    for leaf in leaves:
        own = owned[leaf.id]
        cut = any(child in kept for child in tree.children(leaf.id))
        facts: dict[str, Any] = {**(metadata or {}), "turns": depth[leaf.id]}
        if own[0].fork:
            facts["fork"] = own[0].fork
        if leaf.id in abandoned:
            facts["abandoned"] = True
        if cut:
            facts["cut"] = True
        samples.append(
            _row(
                tree,
                leaf,
                own,
                episode_id=episode_id,
                group_id=group_id,
                index=len(samples),
                prompt_length=root_prompt[leaf.id],
                reward=reward,
                status="truncated" if cut or leaf.finish_reason == "length" else "completed",
                metadata=facts,
            )
        )
    return samples


def _owned(tree: SessionTree, leaves: Sequence[Turn], abandoned: Collection[str]) -> dict[str, list[Turn]]:
    """The turns that are trained in the row of each leaf, by leaf: every turn in that of the leaf that fits best.

    Rows that were abandoned, are of another branch or were cut by their length may be left out of what is trained, and
    are to take nothing else with them: what another row can train is trained there, of equal ones in the first.
    """
    trainer: dict[str, str] = {}
    ranked = sorted(leaves, key=lambda leaf: leaf.finish_reason == "length")
    for left, alike in itertools.product((False, True), (True, False)):
        seen: set[tuple[str, str]] = set()
        for leaf in ranked:
            at: str | None = leaf.id if (leaf.id in abandoned) is left else None
            branch = leaf.branch if alike else ""
            while at is not None and (at, branch) not in seen:
                seen.add((at, branch))
                if not alike or tree[at].branch == branch:
                    trainer.setdefault(at, leaf.id)
                at = tree.parent(at)
    owned: dict[str, list[Turn]] = {leaf.id: [] for leaf in leaves}
    for turn in tree:
        if turn.id in trainer:
            owned[trainer[turn.id]].append(turn)
    return owned


def kept_turns(tree: SessionTree) -> set[str]:
    """Turns the client had: their reply was delivered, or a later prompt continues it. The others are not trained."""
    return {turn.id for turn in tree if turn.delivered or tree.children(turn.id)}


def _row(tree: SessionTree, leaf: Turn, own: list[Turn], **fields: Any) -> Sample:
    """The row of one leaf, with the turns in `own` trained and everything else as context."""
    tokens = tree.ids(leaf.id)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    versions = [""] * len(tokens)
    spans: list[Span] = []
    for turn in own:
        start, end = turn.prompt_length, turn.length
        mask[start:end] = 1
        logprobs[start:end] = turn.logprobs
        for version, first, last in turn.versions:
            versions[start + first : start + last] = [version] * (last - first)
        spans.append(Span(start, turn.id, 0, end - start))
    return Sample(
        branch=leaf.branch,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=tuple(versions),
        spans=tuple(spans),
        **fields,
    )
