"""Sandboxes of a Kubernetes cluster with the agent-sandbox controller: an image is the name of a warm pool.

Image, resources and network are the pool's template's, so only `network="gateway"` or `off` with a template that says
so can be had; the backend must be told that it does.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox.base import SandboxSpec
from sandlot.sandbox.remote.cloud import CloudBackend
from sandlot.sandbox.remote.machine import Machine, errors_as

_PIECE = 48 << 10
_UNKNOWN = ("SandboxTemplateNotFoundError", "SandboxWarmPoolNotFoundError")
_FINAL = ("SandboxClaimFailedError", "ConfigException", "ValueError")


class _Machine(Machine):
    def __init__(self, client: Any, sandbox: Any) -> None:
        self._client, self._sandbox, self.id = client, sandbox, str(sandbox.sandbox_id)

    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        with errors_as(_ours):
            result = await self._sandbox.commands.run(
                shlex.join(["sh", "-c", line]), timeout=int(seconds) + 10, command_timeout=seconds
            )
        return int(result.exit_code), str(result.stdout)

    async def gone(self) -> bool:
        """See `Machine.gone`. The router only says that nobody answers."""
        try:
            return bool((await self._sandbox.status())[0] == "SandboxNotFound")
        except Exception:  # then nobody knows
            return False

    async def put(self, path: str, data: bytes) -> None:
        """Its files API stays below one directory, so files go as text through the shell."""
        quoted = shlex.quote(path)
        for start in range(0, max(1, len(data)), _PIECE):
            text = base64.b64encode(data[start : start + _PIECE]).decode()
            code, said = await self.call(f"echo {text} | base64 -d {'>>' if start else '>'}{quoted}", 60.0)
            if code != 0:
                raise SandboxError(f"{path} could not be written: {said.strip()[-200:] or f'exit {code}'}")

    async def end(self) -> None:
        with suppress(SandboxLostError), errors_as(_ours):
            await self._sandbox.terminate()
            await self._client.list_active_sandboxes()  # it forgets what has ended only when it is asked for the rest


class KubernetesBackend(CloudBackend):
    """See `SandboxBackend`. `client`: an `AsyncSandboxClient`; else one is made of the kubeconfig at hand and of where
    sandboxes are reached: `router` is the URL of the cluster's sandbox router, `gateway` the `[NAMESPACE/]NAME` of the
    Gateway in front of it, and without both the pods themselves are dialled, which works inside of the cluster.
    `isolated`: whether the templates' network policy lets sandboxes reach nothing but the advertised address.
    """

    name = "kubernetes"

    def __init__(
        self,
        client: Any = None,
        *,
        namespace: str = "default",
        isolated: bool = False,
        router: str = "",
        gateway: str = "",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._client, self._namespace, self._isolated = client, namespace, isolated
        self._router, self._gateway = router, gateway

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
                import k8s_agent_sandbox as sdk  # type: ignore[import-not-found,unused-ignore]
                from k8s_agent_sandbox import models  # type: ignore[import-not-found,unused-ignore]
            except ImportError as error:
                raise MissingDependencyError("k8s-agent-sandbox", "kubernetes") from error
            if self._router:
                token = os.environ.get("ROUTER_AUTH_TOKEN", "")
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                way = models.SandboxDirectConnectionConfig(api_url=self._router, extra_headers=headers)
            elif self._gateway:
                space, _, name = self._gateway.rpartition("/")
                way = models.SandboxGatewayConnectionConfig(gateway_name=name, gateway_namespace=space or "default")
            else:
                way = models.SandboxInClusterConnectionConfig()
            self._client = sdk.AsyncSandboxClient(way)
        return self._client

    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """See `CloudBackend.boot`. The cluster ends what outlives its owner.

        Every command brings the environment of `spec`: a claim with one gets no warm pod, if the template allows it.
        """
        sdk = self._sdk()
        with errors_as(partial(_refused, spec.image)):
            sandbox = await sdk.create_sandbox(
                spec.image,
                namespace=self._namespace,
                labels={_label(key): _label(value) for key, value in labels.items() if _label(key)},
                shutdown_after_seconds=int(spec.limits.wall_clock) + 60,
            )
        return _Machine(sdk, sandbox)

    async def examine(self) -> str:
        """See `CloudBackend.examine`."""
        return f"{len(await self._sdk().list_all_sandboxes(namespace=self._namespace))} sandboxes in {self._namespace}"

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        await super().close()
        if self._client is not None:
            await self._client.close()


def _label(text: str) -> str:
    """What Kubernetes takes for a part of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")


def _refused(image: str, error: Exception) -> SandboxError:
    if type(error).__name__ in _UNKNOWN:
        return SandboxUnavailableError(f"the kubernetes backend cannot boot {image}: {error}")
    return _ours(error)


def _ours(error: Exception) -> SandboxError:
    name = type(error).__name__
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    if name == "SandboxNotFoundError" or status == 404:
        return SandboxLostError(f"the kubernetes sandbox is gone: {error}")
    return SandboxError(f"kubernetes: {name}: {error}", retryable=name not in _FINAL and status not in (401, 403, 422))
