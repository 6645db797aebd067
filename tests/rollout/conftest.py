"""Episodes in real local sandboxes, with a small agent and an engine that is told what to say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from sandlot.chat.format import TemplateFormat, load_chat_format
from sandlot.config import load_config
from sandlot.gateway import Gateway, GatewayLimits
from sandlot.rollout.episode import EpisodeRunner
from sandlot.rollout.progress import Silent
from sandlot.sandbox import SANDBOXES
from sandlot.tasks import Task, load_tasks
from sandlot.trajectory.rundir import RunDir
from support.policy import Say, ToldEngine
from support.runner import MakeRunner
from support.tiny_agent import TinyAgent
from support.toy_model import make_toy_model


@pytest.fixture(scope="session")
def fmt(tmp_path_factory: pytest.TempPathFactory) -> TemplateFormat:
    return load_chat_format(make_toy_model(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="session")
def task() -> Task:
    return next(t for t in load_tasks("bundled") if t.id == "page-count")


@pytest.fixture
async def make_runner(fmt: TemplateFormat, tmp_path: Path) -> AsyncIterator[MakeRunner]:
    async with AsyncExitStack() as stack:

        async def make(
            say: Say, *, agent: TinyAgent | None = None, kind: type[EpisodeRunner] = EpisodeRunner, **flags: Any
        ) -> EpisodeRunner:
            config = load_config(None, {"harness": ["tiny"], "retries": 0, **flags})
            run = stack.enter_context(RunDir.create_or_continue(tmp_path / "run", config.model_dump(mode="json")))
            engine = ToldEngine(fmt, say)
            limits = GatewayLimits(engine_retry_delays=(), drain=5)
            gateway = await stack.enter_async_context(Gateway(engine.policy(), limits=limits))
            backend = SANDBOXES.get("local")()
            stack.push_async_callback(backend.close)
            return kind(config, gateway, backend, run, {"tiny": agent or TinyAgent()}, {"tiny": ()}, Silent())

        yield make
