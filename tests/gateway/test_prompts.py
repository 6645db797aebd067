"""Prompts of a session with more branches than are kept whole."""

from __future__ import annotations

import pytest

from sandlot.trajectory.turn import ids_sha256
from support.rig import MakeRig, ask


async def test_branches_beyond_the_bound_go_on_from_the_tree(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandlot.gateway.prompts._TOKENS", 400)
    rig = await make_rig()
    branches = [[f"task {n}"] for n in range(5)]
    kept = rig.session._prompts
    for turn in range(3):
        for branch in branches:
            status, told = await rig.messages(ask(*branch))
            assert status == 200
            branch += [told["content"][0]["text"], f"go on {turn}"]
            lengths = [len(asked.ids) for asked in kept._asked.values()]
            assert kept._kept == sum(lengths)
            assert len(lengths) == 1 or kept._kept <= 400
    assert len(kept._asked) < len(branches)
    turns = rig.session.turns
    assert [turn.parent for turn in turns] == [None] * 5 + [turn.id for turn in turns[:10]]
    for turn, sent in zip(turns, rig.engine.prompts, strict=True):
        assert rig.session.tree.prompt_ids(turn.id).tolist() == sent
        assert turn.prompt_sha256 == ids_sha256(rig.session.tree.prompt_ids(turn.id))
    await rig.gateway.finish(rig.session.id)
