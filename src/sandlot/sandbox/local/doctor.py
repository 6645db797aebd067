"""The local backend's part of `sandlot doctor`: everything is tried, in a real sandbox of this machine."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from sandlot.errors import SandboxError
from sandlot.sandbox.base import Check, Limits, SandboxSpec
from sandlot.sandbox.local import limits

if TYPE_CHECKING:
    from sandlot.sandbox.local.backend import LocalBackend
    from sandlot.sandbox.local.sandbox import LocalSandbox

_SUBORDINATE = "install uidmap (newuidmap, newgidmap) and give yourself 65536 ids: usermod --add-subuids, --add-subgids"
_CONNECT = "exec 3<>/dev/tcp/127.0.0.1/7001 && read -r line <&3 && echo $line"
_OUTSIDE = "exec 3<>/dev/tcp/169.254.169.254/80"


async def examine(backend: LocalBackend) -> list[Check]:
    """All checks; the later ones need the first."""
    started = time.monotonic()
    try:
        sandbox = await backend.create(SandboxSpec(network="gateway", limits=Limits(memory=256 << 20, processes=64)))
    except SandboxError as error:
        text, _, cure = str(error).partition("; ")
        return [Check("namespaces", False, text, cure)]
    milliseconds = (time.monotonic() - started) * 1000
    async with sandbox:
        users = str(sandbox.facts["users"])
        outside = sandbox.facts["ids_outside"]
        ids = "a range of ids, `root` and `agent` are two users" if users == "range" else "one id: `root` is `agent`"
        ids += f"; outside they are {outside['root']} and {outside['agent']}"
        cure = "" if users == "range" else f"run as root, or as a plain user {_SUBORDINATE}"
        return [
            Check("namespaces", True, f"booted on an overlay in {milliseconds:.0f} ms, as {_who()}"),
            Check("users", True, ids, cure),
            await _network(sandbox),
            await _limits(sandbox),
            await _seccomp(sandbox),
            *[await _tool(sandbox, name) for name in ("git", "python3")],
        ]


def _who() -> str:
    return "root" if os.geteuid() == 0 else f"user {os.geteuid()}"


async def _network(sandbox: LocalSandbox) -> Check:
    """The one port is reached from inside, and nothing else is."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"sandlot\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, sock=sandbox.listen(7001))
    async with server:
        inside = await sandbox.exec(["bash", "-c", _CONNECT], timeout=10)
        outside = await sandbox.exec(["bash", "-c", _OUTSIDE], timeout=10)
    if not inside.ok or b"sandlot" not in inside.stdout:
        return Check(
            "network", False, f"the listener was not reached: {inside.text().strip()}", "report it with this text"
        )
    if outside.ok:
        return Check("network", False, "an address outside could be reached", "report it: the network is not isolated")
    return Check("network", True, "the gateway's port answers inside, everything else is unreachable")


async def _limits(sandbox: LocalSandbox) -> Check:
    """A process that takes more memory than allowed dies, the sandbox lives."""
    tier = str(sandbox.facts["limits"]["tier"])
    hog = await sandbox.exec("head -c 600000000 /dev/zero | tail -c 599999999 | wc -c", timeout=30)
    alive = await sandbox.exec(["true"], timeout=10)
    if not alive.ok or (not hog.out_of_memory and hog.stdout.strip() == b"599999999"):
        return Check("limits", False, f"{tier}: memory is not bounded", "report it with the kernel version")
    cure = "" if tier != "rlimits" else f"for limits by the kernel {limits.why_not_groups()}"
    return Check("limits", True, f"{tier}: a memory hog was stopped and the sandbox lives", cure)


async def _seccomp(sandbox: LocalSandbox) -> Check:
    result = await sandbox.exec("grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status", timeout=10)
    values = dict(line.split(":\t") for line in result.stdout.decode().splitlines())
    ok = values.get("Seccomp") == "2" and values.get("NoNewPrivs") == "1" and int(values.get("CapEff", "1"), 16) == 0
    return Check("seccomp", ok, f"{values}" if not ok else "filter on, no new privileges, no capabilities")


async def _tool(sandbox: LocalSandbox, name: str) -> Check:
    result = await sandbox.exec([name, "--version"], timeout=20)
    cure = "" if result.ok else f"install {name} below /usr, or use an image that has it"
    return Check(f"{name} in the host image", result.ok, result.text().strip().splitlines()[0], cure)
