"""Booting a local sandbox: the request to the zygote, and the wait for its init."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.base import SandboxSpec, Snapshot
from sandlot.sandbox.jail import wire
from sandlot.sandbox.local import aio
from sandlot.sandbox.local.sandbox import LocalSandbox


def _boot_cure(said: str) -> str:
    if "mount proc" in said:
        return "its container masks /proc: start that with `--security-opt systempaths=unconfined`"
    if "Read-only file system" in said:
        return "mount layers and put the workdir where the image is writable, for instance below /opt"
    return "run as root, or on a machine that allows it"


async def boot(
    zygote: Callable[[dict[str, Any], Sequence[int]], None],
    body: dict[str, Any],
    spec: SandboxSpec,
    facts: Mapping[str, Any],
    owners: Mapping[str, int],
    image_env: Mapping[str, str],
    on_end: Callable[[LocalSandbox, bool], Awaitable[Snapshot | None]],
    timeout: float = 60.0,
) -> LocalSandbox:
    """Have the zygote fork a keeper, and wait until init is ready.

    `owners`: the ids outside of the users inside, where they differ from ours. `image_env`: below the spec's `env`.
    """
    life, life_theirs = wire.packet_pair()
    control, control_theirs = socket.socketpair()
    try:
        try:
            zygote(body, [life_theirs.fileno(), control_theirs.fileno()])
        finally:
            life_theirs.close()
            control_theirs.close()
        life.setblocking(False)
        control.settimeout(10)
        answer, _ = await aio.packet(life, timeout)
        if answer is None or "ready" not in answer:
            code = (answer or {}).get("errno")
            said = (answer or {}).get("error", "its keeper died")
            while answer is not None:  # the end of the channel: the keeper has cleaned up
                answer, _ = await aio.packet(life, timeout)
            if code in (errno.EPERM, errno.ENOSPC, errno.EACCES, errno.EINVAL, errno.EROFS, errno.ENOTDIR):
                raise SandboxUnavailableError(f"the sandbox cannot boot here ({said}); {_boot_cure(said)}")
            raise SandboxError(f"the sandbox did not boot: {said}")
        facts = {**facts, **answer["ready"]}
        return LocalSandbox(body["id"], spec, facts, life, control, owners, image_env, on_end)
    except TimeoutError as error:
        life.close()
        control.close()
        raise SandboxError(f"the sandbox did not boot within {timeout:g} s") from error
    except BaseException:
        life.close()  # the keeper sees the end and removes what it made
        control.close()
        raise
