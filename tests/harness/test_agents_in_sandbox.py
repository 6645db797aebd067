"""The real CLIs inside the embedded sandbox, where the only thing they can reach is the port we serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandlot.errors import SandboxUnavailableError
from sandlot.harness import Endpoint, Harness
from sandlot.harness.claude_code import ClaudeCode
from sandlot.harness.pi import Pi
from sandlot.sandbox import Sandbox, SandboxSpec
from sandlot.sandbox.local import LocalBackend
from support.mock_vendor import Call, Say, Vendor

pytestmark = [pytest.mark.npm, pytest.mark.slow]

PORT = 8383
OUTSIDE = "exec 2>&1; getent hosts example.com; timeout 5 bash -c 'echo > /dev/tcp/192.0.2.1/80'; echo tried"
AGENTS: list[Any] = [
    pytest.param(Pi(), id="pi-chat"),
    pytest.param(ClaudeCode(), id="claude-bare"),
    pytest.param(ClaudeCode(bare=False), id="claude-full"),
]


@pytest.fixture
async def backend() -> AsyncIterator[LocalBackend]:
    backend = LocalBackend()
    yield backend
    await backend.close()


async def _boot(backend: LocalBackend, harness: Harness) -> Sandbox:
    layers = await asyncio.to_thread(harness.layers)
    try:
        return await backend.create(SandboxSpec(layers=layers, network="gateway"))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("harness", AGENTS)
@pytest.mark.parametrize("user", ["agent", "root"])
async def test_works_and_ends(harness: Harness, user: str, backend: LocalBackend) -> None:
    shell = "Bash" if harness.name == "claude-code" else "bash"
    vendor = Vendor(
        [
            Say("I write it.", (Call(shell, {"command": "id -un > hello.txt"}),)),
            Say(calls=(Call(shell, {"command": "cat hello.txt"}), Call(shell, {"command": OUTSIDE}))),
            Say("Done."),
        ]
    )
    async with await _boot(backend, harness) as sandbox, vendor.serve(sandbox.listen(PORT)):
        endpoint = Endpoint(f"http://127.0.0.1:{PORT}", "sk-secret", "policy", 32_768, 4096)
        await harness.configure(sandbox, endpoint)
        command = harness.command("Write hello.txt.", endpoint)
        result = await sandbox.exec(
            command.argv, user=user, cwd=command.cwd, env=command.env, stdin=command.stdin, timeout=120.0
        )
        assert harness.failure(result) == (None, ""), result.text()
        assert await sandbox.read_file("/workspace/hello.txt") == f"{user}\n".encode()
    assert [a.method for a in vendor.asked] == ["POST"] * 3
    assert all("sk-secret" in str(a.headers) for a in vendor.asked)
    last = str(vendor.asked[-1].body["messages"])
    assert user in last
    assert "unreachable" in last
    assert "tried" in last


@pytest.mark.parametrize("harness", AGENTS[:2])
async def test_layers_are_read_only(harness: Harness, backend: LocalBackend) -> None:
    async with await _boot(backend, harness) as sandbox:
        for layer in sandbox.spec.layers:
            result = await sandbox.exec(
                f"cat {layer.mount_point}/layer.json && touch {layer.mount_point}/x", user="root"
            )
            assert b'"packages"' in result.stdout
            assert b"Read-only file system" in result.stderr
