"""`sandlot doctor`: what works on this machine, tried for real; each no with its cure."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from sandlot.cache import cache_dir
from sandlot.cli.common import JsonFlag, SandboxOptions, answer, chosen_backend, print_json
from sandlot.errors import SandlotError
from sandlot.sandbox import Check
from sandlot.terminal import literal


def command(
    sandbox: Annotated[str | None, typer.Option(help="Sandbox backend to try.")] = None,
    sandbox_option: SandboxOptions = None,
    engine: Annotated[str, typer.Option(help="Engine URL to try.")] = "",
    install: Annotated[bool, typer.Option("--install", help="Also install the agent CLIs.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Try everything a run needs on this machine. Exit 1 when something is missing."""
    checks = [*_machine(), *asyncio.run(_rooms(sandbox, sandbox_option, engine)), *(_harnesses() if install else [])]
    if as_json:
        print_json([check.__dict__ for check in checks])
    else:
        table = Table("", "what", "found", "cure")
        for check in checks:
            state = "[green]yes[/]" if check.ok else "[red]no[/]"
            table.add_row(state, *map(literal, (check.name, check.detail, check.cure)))
        answer.print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _machine() -> list[Check]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    git = shutil.which("git")
    found = [
        Check("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer"),
        Check("machine", memory >= 4, f"{cores} cores, {memory:.0f} GiB memory", "use a machine with 4 GiB or more"),
        _cache(),
        Check("git", git is not None, git or "not found", "install git"),
    ]
    return [replace(check, cure="") if check.ok else check for check in found]


def _cache() -> Check:
    """Whether there is a place for layers, images and models."""
    place = cache_dir()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free / 2**30
    except OSError as error:
        return Check("disk", False, f"{place}: {error.strerror}", "set XDG_CACHE_HOME to a directory you may write to")
    return Check("disk", free >= 5, f"{free:.0f} GiB free in {place}", "free some space, or set XDG_CACHE_HOME")


async def _rooms(sandbox: str | None, options: list[str] | None, engine: str) -> list[Check]:
    checks: list[Check] = []
    try:
        backend = chosen_backend(sandbox, options)
        try:
            checks += await backend.doctor()
        finally:
            await backend.close()
    except SandlotError as error:
        checks.append(Check(f"sandbox {sandbox or ''}".strip(), False, str(error)))
    if engine:
        checks.append(await _engine(engine))
    return checks


async def _engine(url: str) -> Check:
    from sandlot.engine import ENGINES, SamplingParams
    from sandlot.engine.probe import probe

    client = ENGINES.get("vllm")(url)
    try:
        info = await client.info()
        mode = await probe(client, SamplingParams())
    except SandlotError as error:
        return Check("engine", False, str(error), "start it as the error says")
    finally:
        await client.close()
    return Check("engine", True, f"{info.name}: {info.model}, context {info.max_context:,}, {mode} logprobs")


def _harnesses() -> list[Check]:
    from sandlot.harness import HARNESSES

    checks = []
    for name in HARNESSES.names():
        try:
            layers = HARNESSES.get(name)().layers()
        except SandlotError as error:
            checks.append(Check(f"harness {name}", False, str(error)))
        else:
            checks.append(Check(f"harness {name}", True, f"{len(layers)} layers"))
    return checks
