"""The table of wires: every path leads to one of them."""

from __future__ import annotations

import pytest

from sandlot.gateway.wire import WIRES, wire_for


def test_paths_lead_to_their_wire() -> None:
    names = {path: wire_for(path).name for wire in WIRES for path in wire.paths}
    assert names["/v1/messages"] == names["/messages"] == "anthropic"
    assert names["/v1/chat/completions"] == names["/chat/completions"] == "chat"
    assert names["/v1/responses"] == "responses"
    assert wire_for("/v1beta/models/tuned/m-1:streamGenerateContent").name == "google"
    assert len(names) == sum(len(wire.paths) for wire in WIRES)
    assert len({wire.name for wire in WIRES}) == len(WIRES)


def test_other_paths_lead_nowhere() -> None:
    with pytest.raises(KeyError):
        wire_for("/v1/embeddings")
    with pytest.raises(KeyError):
        wire_for("/v1beta/models/m:embedContent")
