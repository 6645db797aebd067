"""Sandlot's gateway under the benchmark: the product's parts as `sandlot gateway` puts them together."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway_kit.loop import StallProbe, obey
from sandlot.chat.format import load_chat_format
from sandlot.engine.base import SamplingParams
from sandlot.engine.sglang import SglangEngine
from sandlot.gateway import Gateway
from sandlot.gateway.call import Policy, Recorder
from sandlot.gateway.gateway import NoRecorder
from sandlot.gateway.process import loaded, serve
from sandlot.rollout.recorder import JournalRecorder
from sandlot.trajectory.journal import JournalWriter
from sandlot.trajectory.records import SessionRecord
from sandlot.trajectory.samples import linearize_tree


async def _serve(model_dir: Path, engine_url: str, journals: Path | None) -> None:
    engine = SglangEngine(engine_url)
    info = await engine.info()
    policy = Policy(
        engine, load_chat_format(model_dir), "bench", SamplingParams(), info.max_context, info.logprobs_mode
    )

    def recorder(session_id: str, header: Mapping[str, Any]) -> Recorder:
        if journals is None:
            return NoRecorder()
        writer = JournalWriter(journals / f"{session_id}.journal.gz")
        writer.append(SessionRecord(episode_id=session_id, group_id=""))
        return JournalRecorder(writer)

    stalls = StallProbe()
    async with Gateway(policy, recorder=recorder) as gateway:
        port = await gateway.serve()

        async def handle(command: dict[str, Any]) -> dict[str, Any]:
            match command["cmd"]:
                case "open":
                    return {"key": gateway.open(command["session"]).api_key}
                case "watch":
                    stalls.start()
                    return {}
                case "stalls":
                    return {"longest_ms": stalls.longest * 1e3, "own_ms": stalls.longest_own * 1e3}
                case "finish":
                    return await _finish(gateway, command["session"])
            raise ValueError(command["cmd"])

        loaded()
        await obey(port, handle)
    await engine.close()


async def _finish(gateway: Gateway, session_id: str) -> dict[str, Any]:
    """Linearize the session by itself, timed, then finish it as the product does, with its audit."""
    session = gateway.session(session_id)
    await session.seal(30)
    for turn in session.recorded_turns():
        if turn.delivered:
            session.tree.mark_delivered(turn.id)
    began = time.process_time()
    samples = linearize_tree(session.tree, episode_id=session_id, group_id="")
    linearized = time.process_time() - began
    began = time.process_time()
    finished = await gateway.finish(session_id)
    return {
        "linearize_ms": linearized * 1e3,
        "finish_ms": (time.process_time() - began) * 1e3,
        "samples": len(finished.samples),
        "tokens": sum(len(s.tokens) for s in samples),
        "trained": finished.report.trained,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--journals", type=Path)
    given = parser.parse_args()
    serve(_serve(given.model, given.engine, given.journals))
