"""What a gateway gives back when a session is deleted, without waiting for a search for cycles."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from support.rig import MakeRig, ask


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deleted_session_is_given_back_at_once(make_rig: MakeRig, stream: bool) -> None:
    rig = await make_rig()
    opened = rig.gateway.open("long")
    session = weakref.ref(opened.session)
    headers = {"x-api-key": opened.api_key}
    gc.collect()
    gc.disable()
    try:
        for turn in range(4):
            body = ask(*["go on"] * (2 * turn + 1), stream=stream)
            async with rig.http.post(f"{rig.url}/v1/messages", json=body, headers=headers) as reply:
                await reply.read()
                assert reply.status == 200
        await rig.gateway.finish("long")
        await rig.gateway.delete("long")
        del opened
        for _ in range(250):  # the last of its tasks may be ending still
            if session() is None:
                break
            await asyncio.sleep(0.02)
        assert session() is None
    finally:
        gc.enable()
