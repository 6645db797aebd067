"""What the policy for thoughts and the model family do to a session that is served over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from sandlot.chat.format import load_chat_format
from sandlot.gateway import Gateway, GatewayLimits
from support.chat_templates import SHAPES, write_chat_dir
from support.families import write_family_dir
from support.policy import ToldEngine, encode_control
from support.rig import Kept, Rig
from support.template_kinds import KINDS

READ = {"name": "read", "description": "", "input_schema": {"type": "object", "properties": {"path": {}}}}


async def talk(fmt: Any, said: Sequence[str | list[int]]) -> Rig:
    """A session of one turn with a call, its result with a reminder beside it, then a new question."""
    engine = ToldEngine(fmt, lambda prompt, number: said[number], 131_072)
    gateway = Gateway(engine.policy(), limits=GatewayLimits(engine_retry_delays=(), grace=0.05, drain=5.0))
    kept = Kept()
    opened = gateway.open(recorder=kept)
    port = await gateway.serve()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        rig = Rig(gateway, engine, opened, f"http://127.0.0.1:{port}", kept, http)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the bug."}]
        for k in range(len(said)):
            status, reply = await rig.messages({"max_tokens": 500, "messages": messages, "tools": [READ]})
            assert status == 200, reply
            shown = [block for block in reply["content"] if block["type"] != "thinking"]  # as clients drop it
            calls = [block for block in shown if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "x = 1"} for c in calls]
            text = [] if calls and k == 0 else [{"type": "text", "text": f"And {k}?"}]
            messages += [{"role": "assistant", "content": shown}, {"role": "user", "content": [*results, *text]}]
    await gateway.close()
    return rig


SAID = [
    '<think>\nplan\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>',
    "<think>\nmore\n</think>\n\nDone.",
    "Yes.",
]


@pytest.mark.parametrize(("thinking", "branches"), [("keep", 1), ("template", 2)])
async def test_where_a_template_leaves_thoughts_out(
    tmp_path: Path, thinking: Literal["keep", "template"], branches: int
) -> None:
    fmt = load_chat_format(write_chat_dir(tmp_path / "m", SHAPES["stripping"]), thinking=thinking)
    rig = await talk(fmt, SAID)
    first, second, third = rig.kept.turns
    assert (second.parent, second.fork) == (first.id, "")  # a result goes on with the thought in either case
    assert sum(t.parent is None for t in rig.kept.turns) == branches
    prompt = fmt.decode(rig.session.tree.ids(third.id))
    if thinking == "keep":
        assert (third.parent, third.fork) == (second.id, "")
        assert "plan" in prompt
        assert "more" in prompt
    else:
        assert third.fork == "the chat format renders in full here"
        assert third.new_ids.size == third.prompt_length
        assert "plan" not in prompt
        assert "more" not in prompt


async def test_a_family_whose_turns_close_with_the_next_role(tmp_path: Path) -> None:
    """GLM samples the opening of the next message as its stop token."""
    pytest.importorskip("renderers")
    fmt = load_chat_format(write_family_dir(tmp_path / "m", "glm-4.5"), family="glm-4.5")
    said = [
        "<think>plan</think>\n<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n</tool_call>",
        "<think></think>\nDone.",
        "Yes.",
    ]
    rig = await talk(fmt, said)
    first, second, third = rig.kept.turns
    assert (second.parent, third.parent) == (first.id, second.id)
    assert [t.parse for t in rig.kept.turns] == [("ok",), (), ()]
    text = fmt.decode(rig.session.tree.ids(third.id))
    assert "<|observation|>\n<tool_response>\nx = 1\n</tool_response>" in text
    assert text.count("plan") == 1


@pytest.mark.parametrize(
    ("stop", "fork"), [("<|user|>", ""), ("<|observation|>", "the chat format renders in full here")]
)
async def test_a_template_whose_turns_close_with_the_next_role(tmp_path: Path, stop: str, fork: str) -> None:
    """Where the model has opened another message than the one that came, the conversation starts anew."""
    fmt = load_chat_format(write_chat_dir(tmp_path / "m", KINDS["opening"]))
    call = "I look.\n<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n</tool_call>"
    said = [encode_control(fmt, text) for text in (f"{call}<|observation|>", f"Done.{stop}", "Yes.<|user|>")]
    rig = await talk(fmt, said)
    first, second, third = rig.kept.turns
    assert second.parent == first.id
    assert (third.parent, third.fork) == ((None, fork) if fork else (second.id, ""))
    assert [t.parse for t in rig.kept.turns] == [("ok",), (), ()]
    text = fmt.decode(rig.session.tree.ids(third.id))
    assert "</tool_call><|observation|>\nx = 1<|assistant|>" in text
    assert text.count("Done.<|user|>\nAnd 1?<|assistant|>") == 1
