"""Doubles of the clouds' SDKs: the same methods and shapes, with sandboxes of the local backend behind them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import itertools
import os
import shlex
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from sandlot.sandbox import Process as Running
from sandlot.sandbox import Sandbox, SandboxSpec, Snapshot
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox
from support.piped import Piped

GONE = {
    name: type(error, (Exception,), {})
    for name, error in {
        "e2b": "SandboxNotFoundException",
        "modal": "NotFoundError",
        "daytona": "DaytonaNotFoundError",
        "kubernetes": "SandboxNotFoundError",
    }.items()
}
"""What each SDK raises for a sandbox that is gone; its name is what counts."""


class CommandExitException(Exception):
    """E2B raises for every exit code but 0."""

    def __init__(self, exit_code: int, stdout: str) -> None:
        super().__init__(f"exited with {exit_code}")
        self.exit_code, self.stdout = exit_code, stdout


@dataclass
class Cloud:
    """What all doubles share: the sandboxes that run, what they were created with, and every call made.

    `tunnel_port`: a port of this machine that sandboxes reach under the same number.
    """

    local: LocalBackend
    tunnel_port: int = 0
    running: dict[str, Sandbox] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    fail_next: Exception | None = None
    """Raised by the next call whose line has `fail_on` in it."""
    fail_on: str = ""
    gone: type[Exception] = Exception
    frozen: dict[str, Snapshot] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def boot(self, **how: Any) -> str:
        self.created.append(how)
        snapshot = self.frozen.get(str(how["image"]))
        sandbox = await self.local.create(SandboxSpec(network="gateway", workdir="/var/tmp/boot", snapshot=snapshot))
        if self.tunnel_port:
            relay = await asyncio.start_server(self._relay, sock=sandbox.listen(self.tunnel_port))
            self._servers.append(relay)
        name = f"sb-{next(self._numbers)}"
        self.running[name] = sandbox
        self.numbers[name] = len(self.created) - 1
        return name

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.tunnel_port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
                target.write_eof()

        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
        writer.close()
        there[1].close()

    async def run(self, name: str, argv: list[str], timeout: float, stdin: bytes = b"") -> tuple[int, str]:
        self._note(name, argv)
        result = await self.running[name].exec(argv, user="root", cwd="/", timeout=timeout, stdin=stdin)
        if result.exit_code is None and not result.timed_out:
            # Whoever kills all inside kills what waits there for the local backend's next command, too.
            result = await self.running[name].exec(argv, user="root", cwd="/", timeout=timeout, stdin=stdin)
        return (-1 if result.exit_code is None else result.exit_code), result.stdout.decode("utf-8", "replace")

    def start(self, name: str, argv: list[str], seconds: float | None) -> Piped:
        """A command whose three streams are open, and which may take some seconds."""
        self._note(name, argv)
        return Piped(cast("LocalSandbox", self.running[name]), argv, seconds)

    def _note(self, name: str, argv: list[str]) -> None:
        if self.fail_next is not None and self.fail_on in argv[-1]:
            error, self.fail_next = self.fail_next, None
            raise error
        if name not in self.running:
            raise self.gone(name)
        self.calls.append(argv[-1])

    async def stream(self, name: str, line: str) -> Streamed:
        """A command whose stdin stays open: on a raw terminal, which carries bytes both ways."""
        if name not in self.running:
            raise self.gone(name)
        command = ["sh", "-c", f"stty raw -echo; exec {line}"]
        process, fd = await self.running[name].terminal(command, user="root", cwd="/")  # type: ignore[attr-defined]
        return Streamed(process, fd)

    async def freeze(self, name: str) -> str:
        kept = f"frozen-{next(self._numbers)}"
        self.frozen[kept] = await self.running[name].snapshot()
        return kept

    async def thaw(self, kept: str) -> None:
        await self.frozen.pop(kept).discard()

    async def write(self, name: str, path: str, data: bytes) -> None:
        if name not in self.running:
            raise self.gone(name)
        await self.running[name].write_file(path, data, user="root")

    async def end(self, name: str) -> None:
        if (sandbox := self.running.pop(name, None)) is None:
            raise self.gone(name)
        await sandbox.kill()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for name in list(self.running):
            await self.end(name)


class Streamed:
    """A command and our side of its terminal."""

    def __init__(self, process: Running, fd: int) -> None:
        self.process, self._fd = process, fd

    async def output(self) -> AsyncIterator[bytes]:
        while True:
            try:
                data = await asyncio.to_thread(os.read, self._fd, 1 << 16)
            except OSError:  # nobody has the other side any more
                return
            yield data

    async def send(self, data: bytes) -> None:
        while data:
            data = data[await asyncio.to_thread(os.write, self._fd, data) :]

    async def end(self) -> None:
        await self.process.kill()


def e2b(cloud: Cloud) -> Any:
    """`e2b.AsyncSandbox`."""
    cloud.gone = GONE["e2b"]

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
            command = await cloud.stream(name, shlex.join(["bash", "-l", "-c", cmd]))

            async def wait() -> None:
                async for data in command.output():
                    await on_stdout(data.decode())

            return SimpleNamespace(wait=wait, send_stdin=command.send, kill=command.end)

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


def _like(path: str, double: Callable[..., Any]) -> Callable[..., Any]:
    """The double, which takes only what the official SDK's own function takes, where that SDK is installed."""
    module, _, name = path.partition(":")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return double
    owner, function = functools.reduce(lambda at, part: (at[1], getattr(at[1], part)), name.split("."), _at(module))
    bound = inspect.ismethod(function) or isinstance(inspect.getattr_static(owner, name.split(".")[-1]), staticmethod)
    signature = inspect.signature(function)

    def checked(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*(() if bound else (None,)), *args, **kwargs)
        return double(*args, **kwargs)

    return checked


def _at(module: str) -> tuple[Any, Any]:
    return None, importlib.import_module(module)


def daytona(cloud: Cloud) -> tuple[Any, Any]:
    """An `AsyncDaytona` and the module `daytona`."""
    cloud.gone = GONE["daytona"]
    run, account = "daytona._async.process:AsyncProcess", "daytona:AsyncDaytona"

    def handle(name: str) -> Any:
        async def execute(command: str, *, cwd: str, timeout: int) -> Any:
            code, out = await cloud.run(name, ["sh", "-c", command], timeout)
            return SimpleNamespace(exit_code=code, result=out)

        sessions: dict[str, Streamed] = {}

        async def create_session(session: str) -> None: ...

        async def execute_session_command(session: str, request: Any) -> Any:
            assert request.run_async
            sessions[session] = await cloud.stream(name, request.command)
            return SimpleNamespace(cmd_id=f"command-of-{session}")

        async def logs(session: str, command: str, on_stdout: Any, on_stderr: Any) -> None:
            async for data in sessions[session].output():
                await on_stdout(data.decode())

        async def send(session: str, command: str, data: str) -> None:
            await sessions[session].send(data.encode())

        async def create_snapshot(kept: str, *, timeout: float) -> None:
            cloud.frozen[kept] = cloud.frozen.pop(await cloud.freeze(name))

        process = SimpleNamespace(
            exec=_like(f"{run}.exec", execute),
            create_session=_like(f"{run}.create_session", create_session),
            execute_session_command=_like(f"{run}.execute_session_command", execute_session_command),
            get_session_command_logs_async=_like(f"{run}.get_session_command_logs_async", logs),
            send_session_command_input=_like(f"{run}.send_session_command_input", send),
            delete_session=_like(f"{run}.delete_session", lambda session: sessions.pop(session).end()),
        )
        return SimpleNamespace(
            id=name,
            labels=cloud.created[cloud.numbers[name]]["labels"],
            process=process,
            create_snapshot=_like("daytona:AsyncSandbox.create_snapshot", create_snapshot),
            fs=SimpleNamespace(
                upload_file=_like(
                    "daytona._async.filesystem:AsyncFileSystem.upload_file",
                    lambda data, path: cloud.write(name, path, data),
                )
            ),
        )

    async def create(params: Any, *, timeout: int) -> Any:
        how = dict(vars(params))
        how.setdefault("image", how.get("snapshot"))
        return handle(await cloud.boot(**how))

    async def listed() -> AsyncIterator[Any]:
        for name in cloud.running:
            yield handle(name)

    async def close() -> None: ...

    client = SimpleNamespace(
        create=_like(f"{account}.create", create),
        delete=_like(f"{account}.delete", lambda one: cloud.end(one.id)),
        list=_like(f"{account}.list", listed),
        close=close,
        snapshot=SimpleNamespace(delete=_like("daytona._async.snapshot:AsyncSnapshotService.delete", cloud.thaw)),
    )
    if importlib.util.find_spec("daytona") is not None:
        return client, importlib.import_module("daytona")  # whose classes say no to what they do not know
    parameters = SimpleNamespace
    module = SimpleNamespace(
        CreateSandboxFromImageParams=parameters,
        CreateSandboxFromSnapshotParams=parameters,
        Image=SimpleNamespace(from_dockerfile=lambda path: path),
        Resources=parameters,
        SessionExecuteRequest=parameters,
    )
    return client, module


def kubernetes(cloud: Cloud) -> Any:
    """A `k8s_agent_sandbox.AsyncSandboxClient`."""
    cloud.gone = GONE["kubernetes"]
    own, inside = "k8s_agent_sandbox:AsyncSandboxClient", "k8s_agent_sandbox.async_sandbox:AsyncSandbox"
    commands = "k8s_agent_sandbox.commands.async_command_executor:AsyncCommandExecutor"

    def handle(name: str) -> Any:
        async def run(command: str, *, timeout: int, command_timeout: float) -> Any:
            code, out = await cloud.run(name, ["sh", "-c", command], command_timeout)
            return SimpleNamespace(exit_code=code, stdout=out, stderr="", timed_out=False)

        return SimpleNamespace(
            sandbox_id=name,
            commands=SimpleNamespace(run=_like(f"{commands}.run", run)),
            terminate=_like(f"{inside}.terminate", lambda: cloud.end(name)),
        )

    async def create_sandbox(
        warmpool: str,
        *,
        namespace: str,
        labels: dict[str, str],
        shutdown_after_seconds: int,
        env: dict[str, str] | None,
    ) -> Any:
        how = {"image": warmpool, "seconds": shutdown_after_seconds, "metadata": labels, "env": env}
        return handle(await cloud.boot(**how))

    async def list_all_sandboxes(*, namespace: str) -> list[str]:
        return list(cloud.running)

    async def close() -> None: ...

    return SimpleNamespace(
        create_sandbox=_like(f"{own}.create_sandbox", create_sandbox),
        list_all_sandboxes=_like(f"{own}.list_all_sandboxes", list_all_sandboxes),
        close=close,
    )
