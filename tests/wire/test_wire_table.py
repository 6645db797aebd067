"""The table of wires: every path leads to one of them."""

from __future__ import annotations

import pytest

from sandlot.chat.messages import Reply
from sandlot.gateway.wire import WIRES, ChatRequest, Wire, wire_for
from support.wire_server import answer


def test_paths_lead_to_their_wire() -> None:
    names = {path: wire_for(path).name for wire in WIRES for path in wire.paths}
    assert names["/v1/messages"] == names["/messages"] == "anthropic"
    assert names["/v1/chat/completions"] == names["/chat/completions"] == "chat"
    assert names["/v1/responses"] == "responses"
    assert wire_for("/v1beta/models/tuned/m-1:streamGenerateContent").name == "google"
    assert len(names) == sum(len(wire.paths) for wire in WIRES)
    assert len({wire.name for wire in WIRES}) == len(WIRES)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_no_text_breaks_the_line_of_its_event(wire: Wire) -> None:
    """For clients, too, that end a line where Unicode does."""
    text = "a\x85b\u2028c\u2029d\x0be\x0cf\r\ng\x1c"
    told = wire.tail(answer(wire, Reply(text, text)), ChatRequest((), (), "m", stream=True)).decode()
    assert told.splitlines() == told.split("\n")[:-1]
    assert "\\u2028" in told


def test_other_paths_lead_nowhere() -> None:
    with pytest.raises(KeyError):
        wire_for("/v1/embeddings")
    with pytest.raises(KeyError):
        wire_for("/v1beta/models/m:embedContent")
