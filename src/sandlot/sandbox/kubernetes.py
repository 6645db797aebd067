"""Sandboxes of a Kubernetes cluster with the agent-sandbox controller: an image is the name of a warm pool.

Image, resources and network are the pool's template's, so only `network="gateway"` or `off` with a template that says
so can be had; the backend must be told that it does.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox.base import SandboxSpec
from sandlot.sandbox.remote.cloud import CloudBackend
from sandlot.sandbox.remote.machine import Machine

_PIECE = 48 << 10
_FINAL = ("SandboxClaimFailedError", "SandboxTemplateNotFoundError", "SandboxWarmPoolNotFoundError")


class _Machine(Machine):
    def __init__(self, sandbox: Any) -> None:
        self._sandbox, self.id = sandbox, str(sandbox.sandbox_id)

    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        try:
            result = await self._sandbox.commands.run(
                shlex.join(["sh", "-c", line]), timeout=int(seconds) + 10, command_timeout=seconds
            )
        except Exception as error:  # the SDK's classes are not ours to import
            raise _ours(error) from error
        return int(result.exit_code), str(result.stdout)

    async def put(self, path: str, data: bytes) -> None:
        """Its files API stays below one directory, so files go as text through the shell."""
        quoted = shlex.quote(path)
        for start in range(0, max(1, len(data)), _PIECE):
            text = base64.b64encode(data[start : start + _PIECE]).decode()
            code, said = await self.call(f"echo {text} | base64 -d {'>>' if start else '>'}{quoted}", 60.0)
            if code != 0:
                raise SandboxError(f"{path} could not be written: {said.strip()[-200:] or f'exit {code}'}")

    async def end(self) -> None:
        try:
            await self._sandbox.terminate()
        except Exception as error:
            if not isinstance(ours := _ours(error), SandboxLostError):
                raise ours from error


class KubernetesBackend(CloudBackend):
    """See `SandboxBackend`. `client`: an `AsyncSandboxClient`. `isolated`: whether the templates' network policy lets
    sandboxes reach nothing but the advertised address.
    """

    name = "kubernetes"

    def __init__(
        self, client: Any = None, *, namespace: str = "default", isolated: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self._client, self._namespace, self._isolated = client, namespace, isolated

    def check(self, spec: SandboxSpec) -> None:
        """See `CloudBackend.check`."""
        super().check(spec)
        if not self._isolated:
            raise SandboxUnavailableError(
                "the kubernetes backend cannot set a network rule; give the template a policy that lets nothing out "
                "but the advertised address, and say so with isolated=True"
            )
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", spec.image):
            raise SandboxUnavailableError(f"{spec.image!r} is no name of a warm pool, which is what kubernetes boots")

    def _sdk(self) -> Any:
        if self._client is None:
            try:
                from k8s_agent_sandbox import AsyncSandboxClient  # type: ignore[import-not-found,unused-ignore]
            except ImportError as error:
                raise MissingDependencyError("k8s-agent-sandbox", "kubernetes") from error
            self._client = AsyncSandboxClient()
        return self._client

    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """See `CloudBackend.boot`. The cluster ends what outlives its owner."""
        sdk = self._sdk()
        try:
            sandbox = await sdk.create_sandbox(
                spec.image,
                namespace=self._namespace,
                labels={re.sub(r"[^\w./-]", "-", key): re.sub(r"[^\w.-]", "-", labels[key])[:63] for key in labels},
                shutdown_after_seconds=int(spec.limits.wall_clock) + 60,
                env=dict(spec.env) or None,
            )
        except Exception as error:
            raise _ours(error) from error
        return _Machine(sandbox)

    async def examine(self) -> str:
        """See `CloudBackend.examine`."""
        return f"{len(await self._sdk().list_all_sandboxes(namespace=self._namespace))} sandboxes in {self._namespace}"

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        await super().close()
        if self._client is not None:
            await self._client.close()


def _ours(error: Exception) -> SandboxError:
    name = type(error).__name__
    if name == "SandboxNotFoundError" or 404 in (getattr(error, "status_code", 0), getattr(error, "status", 0)):
        return SandboxLostError(f"the kubernetes sandbox is gone: {error}")
    return SandboxError(f"kubernetes: {name}: {error}", retryable=name not in _FINAL)
