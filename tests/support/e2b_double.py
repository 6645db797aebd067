"""A double of E2B's SDK: the same methods and shapes, for machines where no SDK of a cloud is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.clouds import Cloud


class SandboxNotFoundException(Exception):
    """E2B's for a sandbox that is gone."""


class CommandExitException(Exception):
    """E2B raises for every exit code but 0."""

    def __init__(self, exit_code: int, stdout: str) -> None:
        super().__init__(f"exited with {exit_code}")
        self.exit_code, self.stdout = exit_code, stdout


def e2b(cloud: Cloud) -> Any:
    """`e2b.AsyncSandbox`."""
    cloud.gone = SandboxNotFoundException

    def handle(name: str) -> Any:
        async def run(cmd: str, *, user: str, cwd: str, timeout: float, background: bool = False, **more: Any) -> Any:
            if background:
                return await start(cmd, timeout=timeout, **more)
            code, out = await cloud.run(name, ["bash", "-l", "-c", cmd], timeout)
            if code != 0:
                raise CommandExitException(code, out)
            return SimpleNamespace(exit_code=0, stdout=out, stderr="")

        async def start(
            cmd: str, *, timeout: float, stdin: bool, on_stdout: Any, on_stderr: Any, retain_output: bool
        ) -> Any:
            assert stdin
            assert timeout == 0
            command = cloud.start(name, ["bash", "-l", "-c", cmd], None)

            async def wait() -> None:
                async for data in command.output(1):
                    await on_stdout(data.decode())

            return SimpleNamespace(wait=wait, send_stdin=command.send, kill=command.kill)

        async def write(path: str, data: bytes, *, user: str, use_octet_stream: bool) -> None:
            await cloud.write(name, path, data)

        async def create_snapshot(*, mode: str) -> Any:
            assert mode == "filesystem"
            return SimpleNamespace(snapshot_id=await cloud.freeze(name))

        return Handle(
            sandbox_id=name,
            metadata=cloud.created[cloud.numbers[name]].get("metadata"),
            commands=SimpleNamespace(run=run),
            files=SimpleNamespace(write=write),
            kill=lambda: cloud.end(name),
            create_snapshot=create_snapshot,
        )

    class Handle(SimpleNamespace):
        @staticmethod
        async def delete_snapshot(kept: str) -> None:
            await cloud.thaw(kept)

    async def create(
        template: str, timeout: int, metadata: dict[str, str], envs: dict[str, str], network: dict[str, Any]
    ) -> Any:
        how = {"image": template, "seconds": timeout, "metadata": metadata, "env": envs, "network": network}
        return handle(await cloud.boot(**how))

    async def connect(name: str) -> Any:
        return handle(name)

    class Pages:
        has_next = True

        async def next_items(self) -> list[Any]:
            self.has_next = False
            return [handle(name) for name in cloud.running]

    return SimpleNamespace(create=create, connect=connect, list=Pages)
