"""Real agent CLIs against a served gateway, in every dialect they speak: one branch, one sample, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.harness import Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.pi import Pi
from support.host_cli import run_on_host
from support.policy import call_text
from support.rig import MakeRig

pytestmark = [pytest.mark.npm, pytest.mark.slow]


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize(
    "harness",
    [
        pytest.param(Pi("chat"), id="pi-chat"),
        pytest.param(Pi("anthropic"), id="pi-anthropic"),
        pytest.param(Pi("responses"), id="pi-responses"),
        pytest.param(Pi("google"), id="pi-google"),
        pytest.param(ClaudeCode(), id="claude-code"),
    ],
)
async def test_a_task_with_parallel_and_bad_calls_is_one_branch(
    make_rig: MakeRig, tmp_path: Path, harness: Harness, prefixed: bool
) -> None:
    shell = "Bash" if harness.name == "claude-code" else "bash"
    said = [
        "<think>\nFirst I write.\n</think>\n\n"
        + call_text(shell, {"command": "echo hi > hello.txt"}, before="I write.\n"),
        call_text(shell, {"command": "cat hello.txt"}) + "\n" + call_text(shell, {"command": "ls -a"}),
        call_text(shell, '{"command": "echo', before="A broken call.\n"),
        call_text("no_such_tool", {"a": 1}),
        "<think>\nI look.\n</think>\n\n" + call_text(shell, {"command": "printf 'caf\u00e9'"}),
        "  All done.\n\n",
    ]
    rig = await make_rig(lambda prompt, number: said[min(number, len(said) - 1)])
    base = f"{rig.url}/s/{rig.session.id}" if prefixed else rig.url
    result = await run_on_host(
        harness, Endpoint(base, rig.opened.api_key, "policy", 120_000, 8_000), "Write hello.txt.", tmp_path
    )
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    turns = rig.session.turns
    assert len(turns) == len(said)
    assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]
    assert rig.session.forks == []
    assert rig.session.counters.calls == {"ok": 4, "invalid_arguments": 1, "unknown_tool": 1}
    finished = await rig.gateway.finish(rig.session.id)
    assert not finished.report.violations
    (sample,) = finished.samples
    assert sum(sample.loss_mask) == sum(len(ids) for ids in rig.engine.sampled)
