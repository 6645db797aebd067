"""Any environment of Harbor as a sandbox: it starts one, runs shell lines and puts files; the rest is made of that."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandlot.errors import MissingDependencyError, SandboxError, SandboxUnavailableError
from sandlot.sandbox.base import DOCKERFILE, SandboxSpec
from sandlot.sandbox.remote.cloud import CloudBackend
from sandlot.sandbox.remote.machine import Machine, errors_as


class _Machine(Machine):
    def __init__(self, environment: Any, scratch: Path) -> None:
        self._environment, self._scratch = environment, scratch
        self.id = str(environment.session_id)

    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        with errors_as(_ours):
            # Some of them put both streams into one.
            result = await self._environment.exec(
                f"exec 2>/dev/null; {line}", cwd="/", timeout_sec=int(seconds) + 1, user="root"
            )
        return int(result.return_code), str(result.stdout or "")

    async def put(self, path: str, data: bytes) -> None:
        file = self._scratch / secrets.token_hex(8)
        try:
            with errors_as(_ours):
                await asyncio.to_thread(file.write_bytes, data)
                await self._environment.upload_file(file, path)
        finally:
            file.unlink(missing_ok=True)

    async def end(self) -> None:
        try:
            with errors_as(_ours):
                await self._environment.stop(delete=True)
        finally:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


class HarborBackend(CloudBackend):
    """See `SandboxBackend`. `environment`: a name of Harbor's, or `module:Class`; `kwargs` are its own options.

    An image is a reference, or `dockerfile:` and the directory of one, which the environment builds. Harbor knows no
    labels, so what a dead run left ends as the environment itself ends it.
    """

    name = "harbor"
    builds = True

    def __init__(self, environment: str = "docker", *, kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._environment, self._kwargs = environment, dict(kwargs or {})

    async def boot(self, spec: SandboxSpec, labels: Mapping[str, str]) -> Machine:
        """See `CloudBackend.boot`."""
        _require()
        scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="sandlot-harbor-"))
        try:
            environment = await asyncio.to_thread(self._make, spec, scratch)
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
            if not isinstance(error, Exception | SystemExit):
                raise
            raise SandboxUnavailableError(f"Harbor's environment {self._environment} refuses: {error}") from error
        machine = _Machine(environment, scratch)
        try:
            await environment.start(force_build=False)
        except Exception as error:
            await machine.end()
            raise _ours(error) from error
        return machine

    def _make(self, spec: SandboxSpec, scratch: Path) -> Any:
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
        from harbor.models.trial.config import EnvironmentConfig as Chosen
        from harbor.models.trial.paths import TrialPaths

        directory, image = scratch / "environment", spec.image.removeprefix("docker://")
        directory.mkdir()
        if image.startswith(DOCKERFILE):
            directory, image = Path(image.removeprefix(DOCKERFILE)), ""
        paths = TrialPaths(trial_dir=scratch / "trial")
        paths.mkdir()
        network: dict[str, Any] = {"network_mode": "no-network"}
        if spec.network == "gateway" and self.tunnel is not None:
            network = {"network_mode": "allowlist", "allowed_hosts": [self.tunnel.host]}
        limits = spec.limits
        wanted = EnvironmentConfig(
            docker_image=image or None,
            cpus=limits.cpu,
            memory_mb=limits.memory >> 20,
            storage_mb=limits.disk >> 20,
            env=dict(spec.env),
            **network,
        )
        chosen = {"import_path" if ":" in self._environment else "type": self._environment}
        return EnvironmentFactory.create_environment_from_config(
            Chosen(kwargs=self._kwargs, **chosen),
            environment_dir=directory,
            environment_name="sandlot",
            session_id=f"sandlot-{secrets.token_hex(6)}",
            trial_paths=paths,
            task_env_config=wanted,
            network_policy=NetworkPolicy(**network),
            enable_environment_dir_upload=False,
        )

    async def examine(self) -> str:
        """See `CloudBackend.examine`."""
        _require()
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.environment_type import EnvironmentType

        by_path = ":" in self._environment
        found = await asyncio.to_thread(
            EnvironmentFactory.get_environment_class,
            import_path=self._environment if by_path else None,
            environment_type=None if by_path else EnvironmentType(self._environment),
        )
        await asyncio.to_thread(found.preflight, self._kwargs)
        return f"{self._environment} is ready"


def _require() -> None:
    try:
        import harbor  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("harbor", "harbor") from error


def _ours(error: Exception) -> SandboxError:
    # Harbor's environments say by no common class that a sandbox is gone.
    return SandboxError(f"harbor: {type(error).__name__}: {error}")
