"""The toy model's chat format, and gateways over an engine that is told what to say."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from sandlot.chat.format import TemplateFormat, load_chat_format
from sandlot.gateway import Gateway, GatewayLimits, SessionLimits
from support.policy import Say, ToldEngine
from support.rig import Kept, MakeRig, Rig
from support.toy_model import make_toy_model


@pytest.fixture(scope="session")
def fmt(tmp_path_factory: pytest.TempPathFactory) -> TemplateFormat:
    return load_chat_format(make_toy_model(tmp_path_factory.mktemp("toy")))


@pytest.fixture
async def make_rig(fmt: TemplateFormat) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    async def make(
        say: Say = lambda prompt, number: f"reply {number}",
        *,
        limits: SessionLimits | None = None,
        gateway_limits: GatewayLimits | None = None,
        max_context: int = 131_072,
    ) -> Rig:
        engine = ToldEngine(fmt, say, max_context)
        gateway_limits = gateway_limits or GatewayLimits(engine_retry_delays=(), keepalive=0.2, grace=0.05, drain=5.0)
        gateway = Gateway(engine.policy(), limits=gateway_limits)
        kept = Kept()
        opened = gateway.open(limits=limits, recorder=kept)
        port = await gateway.serve()
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        rigs.append(Rig(gateway, engine, opened, f"http://127.0.0.1:{port}", kept, http))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.release.set()
        await rig.http.close()
        await rig.gateway.close()
