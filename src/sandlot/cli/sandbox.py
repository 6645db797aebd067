"""`sandlot sandbox`: open a sandbox to look around, see which live, and remove what dead runs left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.table import Table

from sandlot.cli.common import (
    JsonFlag,
    SandboxName,
    SandboxOptions,
    answer,
    chosen_backend,
    console,
    counted,
    print_json,
)
from sandlot.errors import ConfigError
from sandlot.sandbox import AGENT_USER, Lists, Process, Sandbox, SandboxBackend, SandboxSpec, Terminals
from sandlot.terminal import literal

group = typer.Typer(help="Look into sandboxes, list them, and sweep up.", no_args_is_help=True, add_completion=False)


@group.command()
def shell(
    image: Annotated[str, typer.Argument(help="What to boot; `host` is this machine's /usr.")] = "host",
    sandbox: SandboxName = None,
    sandbox_option: SandboxOptions = None,
    user: Annotated[str, typer.Option(help="`agent` or `root`.")] = AGENT_USER,
    command: Annotated[str, typer.Option("-c", help="Run this instead of a shell.")] = "",
) -> None:
    """Boot IMAGE and open a shell in it. It is gone, with all that was written, when the shell ends.

    Without a terminal, what comes on stdin is run. The exit status is the shell's.
    """
    raise typer.Exit(
        asyncio.run(_shell(chosen_backend(sandbox, sandbox_option), SandboxSpec(image=image), user, command))
    )


async def _shell(backend: SandboxBackend, spec: SandboxSpec, user: str, command: str) -> int:
    try:
        async with await backend.create(spec) as sandbox:
            if command or not sys.stdin.isatty():
                return await _run(sandbox, user, command)
            if not isinstance(sandbox, Terminals):
                raise ConfigError(
                    f"the sandbox backend {backend.name} has no terminals; give a command with -c, or a script on stdin"
                )
            console.print(f"{spec.image} in sandbox {sandbox.id}; leave with `exit`", style="dim", highlight=False)
            shells = "if command -v bash >/dev/null; then exec bash -i; else exec sh -i; fi"
            process, terminal = await sandbox.terminal(
                shells, user=user, env={"TERM": os.environ.get("TERM", "xterm"), "PS1": r"\u@sandlot:\w\$ "}
            )
            try:
                return await _converse(process, terminal)
            finally:
                os.close(terminal)
    finally:
        await backend.close()


async def _run(sandbox: Sandbox, user: str, command: str) -> int:
    script = b"" if command else await asyncio.to_thread(sys.stdin.buffer.read)
    result = await sandbox.exec(command or ["/bin/sh", "-s"], user=user, stdin=script, timeout=None)
    for stream, data in ((sys.stdout, result.stdout), (sys.stderr, result.stderr)):
        stream.buffer.write(data)
        stream.flush()
    return 137 if result.exit_code is None else result.exit_code


async def _converse(process: Process, terminal: int) -> int:
    """Join our terminal and the sandbox's until the process ends."""
    loop = asyncio.get_running_loop()
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    before = termios.tcgetattr(keyboard)

    def resize() -> None:
        with suppress(OSError):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(keyboard, termios.TIOCGWINSZ, bytes(8)))

    def pass_on(source: int, target: int) -> None:
        try:
            data = os.read(source, 1 << 16)
        except OSError:  # nobody holds the other side of the terminal any more
            data = b""
        if not data:
            loop.remove_reader(source)
        while data:
            data = data[os.write(target, data) :]

    resize()
    tty.setraw(keyboard)
    loop.add_signal_handler(signal.SIGWINCH, resize)
    loop.add_reader(keyboard, pass_on, keyboard, terminal)
    loop.add_reader(terminal, pass_on, terminal, screen)
    try:
        code = (await process.wait()).exit_code
        os.set_blocking(terminal, False)
        pass_on(terminal, screen)
        return 137 if code is None else code
    finally:
        for fd in (keyboard, terminal):
            loop.remove_reader(fd)
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@group.command("list")
def list_sandboxes(
    sandbox: SandboxName = None, sandbox_option: SandboxOptions = None, as_json: JsonFlag = False
) -> None:
    """The sandboxes that live here, whichever process made them."""
    backend = chosen_backend(sandbox, sandbox_option)
    if not isinstance(backend, Lists):
        raise ConfigError(f"the sandbox backend {backend.name} cannot list sandboxes; ask its own tools")
    found = asyncio.run(_closing(backend, backend.running()))
    if as_json:
        print_json([{**one.__dict__, "labels": dict(one.labels)} for one in found])
        return
    table = Table("sandbox", "image", "made by", "age", "labels")
    for one in found:
        labels = " ".join(f"{key}={value}" for key, value in sorted(one.labels.items()))
        age = f"{max(0.0, time.time() - one.started):.0f} s"
        table.add_row(one.id, literal(one.image), literal(one.owner), age, literal(labels))
    answer.print(table)


@group.command()
def sweep(sandbox: SandboxName = None, sandbox_option: SandboxOptions = None, as_json: JsonFlag = False) -> None:
    """Remove what dead runs left behind, and only that."""
    backend = chosen_backend(sandbox, sandbox_option)
    removed = asyncio.run(_closing(backend, backend.sweep()))
    if as_json:
        print_json({"removed": removed})
    else:
        answer.print(f"{counted(removed, 'sandbox', 'sandboxes')} of dead runs removed")


async def _closing(backend: Any, call: Any) -> Any:
    try:
        return await call
    finally:
        await backend.close()
