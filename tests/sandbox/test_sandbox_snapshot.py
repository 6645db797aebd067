"""Frozen files: booted from many times, never changed by it, gone when nobody needs them."""

import asyncio
import os
from typing import Any

import pytest

from sandlot.errors import SandboxLostError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend
from support.backends import CLOUDS, FREEZING, MAKER

BACKENDS = FREEZING
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def _snapshots(backend: Any) -> list[str]:
    if backend.name in CLOUDS:
        return list(backend.cloud.frozen)
    if backend.name == "docker":
        docker = await backend._client()
        images = await docker.images.list(filters={"label": [f"sandlot.owner={MAKER}"]})
        tags = [tag for image in images for tag in image.get("RepoTags") or []]
        return [tag for tag in tags if tag.startswith("localhost/sandlot-snapshot:")]
    return [name for name in os.listdir(backend.run_dir) if name.startswith("snapshot-")]


async def test_a_snapshot_boots_many(backend: LocalBackend) -> None:
    first = await backend.create(SandboxSpec())
    await first.exec("echo one > a; echo two > b; mkdir d; touch d/x; chmod 750 d; ln -s a l; sleep 94.5 &")
    await first.exec("echo root > /opt/r; rm -r /srv", user="root")
    snapshot = await first.snapshot()
    with pytest.raises(SandboxLostError):
        await first.exec(["true"])
    await first.kill()
    forks = await asyncio.gather(*(backend.create(SandboxSpec(snapshot=snapshot)) for _ in range(3)))
    for fork in forks:
        seen = await fork.exec("cat a b l /opt/r; stat -c '%a %U' d; ls -d /srv d/x; rm a; echo changed > b; rm -r d")
        assert seen.stdout == b"one\ntwo\none\nroot\n750 agent\nd/x\n"
        assert b"94.5" not in (await fork.exec("ps axww | grep -v grep")).stdout
    second = await forks[0].snapshot()
    await snapshot.discard()
    await snapshot.discard()
    async with await backend.create(SandboxSpec(snapshot=second)) as late:
        assert (await late.exec("ls; cat b l /opt/r")).stdout == b"b\nl\nchanged\nroot\n"
        await second.discard()
        assert (await late.exec("cat b")).stdout == b"changed\n"
        if backend.name not in CLOUDS:  # which keep for themselves what is in use
            assert len(await _snapshots(backend)) == 2
    if backend.name not in CLOUDS:
        assert len(await _snapshots(backend)) == 1
    assert (await forks[1].exec("cat b /opt/r")).stdout == b"changed\nroot\n"
    await asyncio.gather(*(fork.kill() for fork in forks))
    if backend.name != "modal":  # whose images end by themselves
        assert await _snapshots(backend) == []


async def test_a_dead_sandbox_cannot_be_frozen(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    await sandbox.kill()
    with pytest.raises(SandboxLostError):
        await sandbox.snapshot()


async def test_the_doctor_tries_everything(backend: LocalBackend) -> None:
    if backend.name != "local":
        assert all(check.ok for check in await backend.doctor())
        return
    checks = {check.name: check for check in await backend.doctor()}
    assert {"namespaces", "users", "network", "limits", "seccomp"} <= set(checks)
    for name in ("namespaces", "network", "limits", "seccomp"):
        assert checks[name].ok, checks[name]
