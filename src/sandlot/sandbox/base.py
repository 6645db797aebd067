"""The contract of a sandbox: an isolated machine for one phase of one episode."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

AGENT_USER = "agent"
"""The unprivileged user that agents and code under test run as. `root` is the sandbox's own root."""
DOCKERFILE = "dockerfile:"
"""An image that begins so is the directory of a Dockerfile, for backends that build."""


@dataclass(frozen=True)
class Layer:
    """A host directory that all sandboxes share, mounted read-only at `mount_point`."""

    source: Path
    mount_point: str


@dataclass(frozen=True)
class Limits:
    """Upper bounds of one sandbox. Memory, disk and output in bytes, cpu in cores, wall clock in seconds."""

    memory: int = 4 << 30
    processes: int = 512
    cpu: float | None = None
    disk: int = 8 << 30
    open_files: int = 4096
    output: int = 16 << 20
    wall_clock: float = 4 * 3600.0


@dataclass(frozen=True)
class SandboxSpec:
    """What to boot.

    `image`: `host` (the machine's own /usr, read-only), a directory, or what the backend names. `network` is
    `off`, or `gateway`: nothing but the one port that `listen` serves. `workdir` is made and owned by the agent user.
    `snapshot` boots from the files of an earlier sandbox instead of the image's.
    """

    image: str = "host"
    layers: tuple[Layer, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"
    limits: Limits = Limits()
    network: Literal["off", "gateway"] = "off"
    snapshot: Snapshot | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecResult:
    """What a command did. `exit_code` is None when it was killed (`timed_out`, `out_of_memory`, or by a signal).

    `stdout` and `stderr` are bytes, cut at the output limit (`truncated`). `duration` in seconds.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    out_of_memory: bool = False
    duration: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def text(self) -> str:
        """stdout and stderr for people: decoded with replacement."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class Snapshot(Protocol):
    """The files of a sandbox, frozen. `discard` frees them."""

    async def discard(self) -> None: ...


class Process(Protocol):
    """A running command, detached from the call that started it."""

    @property
    def running(self) -> bool: ...

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for the end. On `timeout` the whole process group is killed and `timed_out` is set."""
        ...

    async def kill(self) -> None:
        """Kill the process and all that it started. Returns when they are dead."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """A booted sandbox; an async context manager that kills it at exit.

    No call is repeated by the backend unless its docstring says so. Any call may raise `SandboxLostError`.
    """

    id: str
    spec: SandboxSpec
    facts: Mapping[str, Any]
    """What is in force here: backend, isolation, limit tier, user mapping. Goes into the episode's metadata."""

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = 60.0,
    ) -> ExecResult:
        """Run a command (a string goes through `/bin/sh -c`) and wait. On timeout its whole tree is dead at return."""
        ...

    async def spawn(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Process:
        """Start a command and return at once."""
        ...

    async def kill_processes(self) -> None:
        """Kill every process of every user in the sandbox, daemons too. Files stay; `exec` works again after."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Content of a regular file. Links are resolved inside the sandbox only; may be repeated.

        Raises `FileNotFoundError`, and `SandboxError` for what is no regular file or larger than `max_bytes`.
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644, user: str = AGENT_USER) -> None:
        """Write a file, parents made; may be repeated."""
        ...

    async def upload_tar(self, path: str, data: bytes | Path, *, user: str = AGENT_USER) -> None:
        """Unpack an uncompressed tar (a `Path`: a file of this machine) below the directory `path`, inside the sandbox,
        owned by `user`."""
        ...

    def download_tar(
        self, path: str, *, exclude_names: Sequence[str] = (), max_bytes: int = 2 << 30
    ) -> AsyncIterator[bytes]:
        """Stream a directory as an uncompressed tar, members relative to `path`, made by our own code.

        Regular files, directories and symbolic links only. `exclude_names` are base names left out at any depth.
        """
        ...

    def listen(self, port: int) -> socket.socket:
        """A listening TCP socket on 127.0.0.1:`port` inside the sandbox, to be served by the caller.

        Only with `network="gateway"`. Whoever connects is this sandbox, whatever it says of itself.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Kill all processes and freeze the files; the sandbox is gone afterwards."""
        ...

    async def kill(self) -> None:
        """End the sandbox: no process, mount, cgroup or file stays. Idempotent."""
        ...

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc: object) -> None: ...


@dataclass(frozen=True)
class Check:
    """One line of the doctor: what was tried, whether it works, and the cure if not."""

    name: str
    ok: bool
    detail: str
    cure: str = ""


@dataclass(frozen=True)
class Running:
    """A sandbox that lives on this machine or account, whoever made it. `started` in seconds since the epoch."""

    id: str
    image: str
    owner: str
    started: float
    labels: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Terminals(Protocol):
    """What a sandbox offers besides where it can have terminals for people."""

    async def terminal(
        self,
        command: Sequence[str] | str,
        *,
        user: str = AGENT_USER,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[Process, int]:
        """Start a command on a new terminal of the sandbox: the process, and our side of the terminal as an fd."""
        ...


@runtime_checkable
class Lists(Protocol):
    """What a backend offers besides where it can see the sandboxes of other processes."""

    async def running(self) -> list[Running]:
        """All sandboxes of this backend that live, oldest first."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """Makes sandboxes. One per process and backend; `close` sweeps what it made."""

    name: str

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Boot. `SandboxUnavailableError` when the machine or backend cannot do what `spec` asks."""
        ...

    async def doctor(self) -> list[Check]:
        """Try everything on this machine, for real."""
        ...

    async def sweep(self) -> int:
        """Remove what dead runs left behind, and only that; the number of sandboxes removed."""
        ...

    async def close(self) -> None: ...
