"""A harness as it is written on the command line: its wire and its options, typed, or one clear error."""

from __future__ import annotations

from typing import Any

import pytest

from sandlot.errors import ConfigError
from sandlot.harness import HARNESSES, Endpoint
from sandlot.harness.chosen import chosen

ENDPOINT = Endpoint("http://127.0.0.1:8000", "k", "m", 200_000, 4096)


def harness(written: str) -> Any:
    return chosen(written, lambda text: None)


@pytest.mark.parametrize("name", HARNESSES.names())
def test_a_name_alone_is_the_harness_as_it_is(name: str) -> None:
    alone, built = harness(name), HARNESSES.get(name)()
    assert (alone.name, alone.protocols) == (name, built.protocols)
    assert alone.command("Go.", ENDPOINT) == built.command("Go.", ENDPOINT)


def test_wires_and_options_reach_the_cli() -> None:
    assert harness("opencode:google").protocols[0] == "google"
    full = harness("claude-code:bare=no:compaction=true").command("Go.", ENDPOINT)
    assert "--bare" not in full.argv
    assert "DISABLE_AUTO_COMPACT" not in full.env
    assert "--bare" in harness("claude-code:bare=1").command("Go.", ENDPOINT).argv
    assert 'model = "gpt-5.5"' in harness("codex:as_model=gpt-5.5").config(ENDPOINT)
    both = harness("opencode:anthropic:compaction=true")
    assert (both.protocol, both.config(ENDPOINT)["compaction"]["auto"]) == ("anthropic", True)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("nobody", "no sandlot.harnesses called 'nobody'"),
        ("pi:smoke", "does not speak 'smoke'"),
        ("codex:chat", "codex speaks one wire only; leave out 'chat'"),
        ("codex:compact=true", "codex has no option 'compact'; its options: as_model, compaction"),
        ("pi:protocol=chat", "pi has no option 'protocol'; its options: compaction"),
        ("pi:progress=x", "pi has no option 'progress'"),
        ("claude-code:bare=maybe", "claude-code:bare=maybe: input should be a valid boolean"),
        ("pi:chat:compaction", "'compaction' is no option; write pi:WIRE:OPTION=VALUE"),
    ],
)
def test_what_cannot_be_is_one_clear_error(written: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        harness(written)
    assert says in str(caught.value)
