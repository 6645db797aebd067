"""The local sandbox as an environment of Harbor's, which takes it by this module and the name of the class."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.options import EnvironmentOptions
from harbor.environments.tar_transfer import extract_dir_from_file, pack_dir_to_bytes
from harbor.models.task.config import NetworkMode, NetworkPolicy

from sandlot.errors import SandboxError
from sandlot.sandbox.base import AGENT_USER, Limits, Sandbox, SandboxSpec
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.remote.tunnel import pump

_WORKDIR = "/app"
_USERS = {None: "root", "root": "root", "0": "root", AGENT_USER: AGENT_USER, "1000": AGENT_USER}


class LocalOptions(EnvironmentOptions):  # type: ignore[misc,unused-ignore]
    """`image`: boots this instead of the task's (`host`, a directory, an archive, `docker://` and a name).

    `offline`: run tasks that ask for a public network without one. `model_address`: HOST:PORT of a server of this
    machine's side, found inside at 127.0.0.1 and `model_port`.
    """

    image: str = ""
    offline: bool = False
    model_address: str = ""
    model_port: int = 8400


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc,unused-ignore]
    """See Harbor's `BaseEnvironment`."""

    options_model = LocalOptions
    options: LocalOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backend: LocalBackend | None = None
        self._sandbox: Sandbox | None = None
        self._way: asyncio.Server | None = None

    @staticmethod
    def type() -> str:
        """The name in Harbor's records."""
        return "sandlot-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """There is no network but `model_address`."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Limits are ceilings; nothing is reserved."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Refuse a public network unless the run says that it can do without."""
        policy = network_policy or self._network_policy
        if policy.network_mode == NetworkMode.PUBLIC and not self.options.offline:
            raise ValueError(
                "sandlot's local sandboxes have no public network; set network_mode to no-network in the task, or run "
                "with --ek offline=true"
            )
        super().validate_network_policy_support(policy)

    def _validate_definition(self) -> None:
        if not self._image:
            raise ValueError(
                "sandlot's local sandboxes build no Dockerfile; set docker_image in the task, or name an image with "
                "--ek image=..."
            )

    @property
    def _image(self) -> str:
        named = self.task_env_config.docker_image
        return self.options.image or (f"docker://{named}" if named else "")

    async def start(self, force_build: bool) -> None:
        """Boot. `force_build` means nothing where nothing is built."""
        config, usual = self.task_env_config, Limits()
        limits = Limits(
            memory=config.memory_mb << 20 if config.memory_mb else usual.memory,
            disk=config.storage_mb << 20 if config.storage_mb else usual.disk,
            cpu=float(config.cpus) if config.cpus else None,
            wall_clock=24 * 3600.0,
        )
        spec = SandboxSpec(
            image=self._image,
            env=dict(self._startup_env() or {}),
            workdir=config.workdir or _WORKDIR,
            limits=limits,
            network="gateway" if self.options.model_address else "off",
            labels={"harbor": self.session_id},
        )
        self._backend = LocalBackend()
        try:
            self._sandbox = await self._backend.create(spec)
            if self.options.model_address:
                listener = self._sandbox.listen(self.options.model_port)
                self._way = await asyncio.start_server(self._carry, sock=listener)
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def stop(self, delete: bool) -> None:
        """End the sandbox. It cannot be kept without its owner, whatever `delete` says."""
        if self._way is not None:
            self._way.close()
        if self._backend is not None:
            backend, self._backend, self._sandbox = self._backend, None, None
            await backend.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command by bash."""
        wanted = self._resolve_user(user)
        name = _USERS.get(None if wanted is None else str(wanted))
        if name is None:
            raise ValueError(f"there is no user {wanted!r} in a sandbox; there are: {AGENT_USER}, root")
        result = await self._booted.exec(
            ["bash", "-c", command], cwd=cwd, env=self._merge_env(env) or {}, user=name, timeout=timeout_sec
        )
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        out, err = result.stdout.decode("utf-8", "replace"), result.stderr.decode("utf-8", "replace")
        if (told := self._output_callback()) is not None:
            for text, stream in ((out, "stdout"), (err, "stderr")):
                if text:
                    await told(text, stream)
        return ExecResult(stdout=out, stderr=err, return_code=137 if result.exit_code is None else result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Put a file in, with its mode."""
        data, mode = await asyncio.to_thread(lambda: (Path(source_path).read_bytes(), Path(source_path).stat().st_mode))
        await self._booted.write_file(target_path, data, mode=mode & 0o777, user="root")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Put in what a directory holds."""
        packed = await asyncio.to_thread(pack_dir_to_bytes, source_dir, compress=False)
        await self._booted.upload_tar(target_dir, packed.getvalue(), user="root")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Get a file out."""
        data = await self._booted.read_file(source_path, max_bytes=2 << 30)
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Get out what a directory holds; Harbor's own care is taken of hostile archives."""
        with tempfile.NamedTemporaryFile() as spool:
            async for piece in self._booted.download_tar(source_dir):
                await asyncio.to_thread(spool.write, piece)
            spool.flush()
            await asyncio.to_thread(extract_dir_from_file, Path(spool.name), target_dir)

    @property
    def _booted(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError("the environment is not started", retryable=False)
        return self._sandbox

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.options.model_address.rpartition(":")
        try:
            there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
        for one in (writer, there[1]):
            one.close()
