"""`sandlot replay`: send recorded requests again, to any compatible server, and measure it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from sandlot.cli.common import JsonFlag, console, print_json, ticking
from sandlot.errors import ConfigError

if TYPE_CHECKING:
    from sandlot.rollout.replay import Job, Result


def command(
    file: Annotated[Path | None, typer.Argument(help="JSONL, one recorded request a line.", show_default=False)] = None,
    base_url: Annotated[str, typer.Option(help="The server that gets the requests of FILE.")] = "",
    run: Annotated[Path | None, typer.Option(help="Instead of FILE: a run directory, asked by token ids.")] = None,
    engine: Annotated[str, typer.Option(help="Engine URL that gets the prompts of --run.")] = "",
    engine_kind: Annotated[str, typer.Option(help="`vllm` or `sglang`.")] = "vllm",
    concurrency: Annotated[int, typer.Option("-j", "--concurrency", min=1, help="Requests at once.")] = 8,
    retries: Annotated[int, typer.Option(min=0, help="How often a failure that may pass is tried again.")] = 2,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Instead of as recorded.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How often all of it is sent.")] = 1,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for instead of the recorded one.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent the way each protocol wants it.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="`Name: value`; may be given again.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one try.")] = 600.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSONL with one line per request.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Send recorded requests to a server: OpenAI chat and Responses, Anthropic and Google, told apart line by line.

    With --run, the prompts of a run's journals go to an engine by token ids, each episode's one after another.
    """
    if (file is None) == (run is None):
        raise ConfigError("give either a FILE of requests or --run RUN")
    if file is not None and "://" not in base_url:
        raise ConfigError("say where the requests go: --base-url http://HOST:PORT")
    if run is not None and "://" not in engine:
        raise ConfigError("say which engine is asked: --engine http://HOST:PORT")
    headers = dict(_header(text) for text in header or ())

    async def all_of_it(tick: Callable[[int, int], None], lines: BinaryIO | None) -> Sequence[Result]:
        from sandlot.rollout.replay import replay

        async with AsyncExitStack() as stack:
            if file is not None:
                chains, total = await _requests(stack, file, base_url, api_key, headers, timeout, model, stream, repeat)
                if max_requests is not None:
                    chains, total = chains[:max_requests], min(total, max_requests)
            else:
                assert run is not None
                chains, total = await _prompts(stack, run, engine, engine_kind, model, repeat, max_requests)
            done = 0

            def on_result(result: Result) -> None:
                nonlocal done
                done += 1
                tick(done, total)
                if lines is not None:
                    lines.write(msgspec.json.encode(asdict(result)) + b"\n")
                    lines.flush()

            return await replay(chains, concurrency=concurrency, retries=retries, on_result=on_result)

    opened: AbstractContextManager[BinaryIO | None] = out.open("wb") if out is not None else nullcontext()
    with opened as lines, ticking("replaying") as tick:
        begin = time.monotonic()
        results = asyncio.run(all_of_it(tick, lines))
        seconds = time.monotonic() - begin
    _show(results, seconds, as_json)
    if any(not result.ok for result in results):
        raise typer.Exit(1)


async def _requests(
    stack: AsyncExitStack,
    file: Path,
    base_url: str,
    api_key: str | None,
    headers: dict[str, str],
    timeout: float,
    model: str | None,
    stream: bool | None,
    repeat: int,
) -> tuple[list[list[Job]], int]:
    from functools import partial

    from sandlot.rollout.replay import Job
    from sandlot.rollout.replay_requests import read_requests
    from sandlot.rollout.replay_send import Sender

    requests = [request.for_server(model=model, stream=stream) for request in read_requests(file)]
    for request in requests:
        if not request.model:
            raise ConfigError(f"{request.name} names no model: give one with --model")
    sender = await stack.enter_async_context(Sender(base_url, api_key=api_key, headers=headers, timeout_s=timeout))
    jobs = [[Job(request.name, request.kind, partial(sender.send, request))] for request in requests] * repeat
    return jobs, len(jobs)


async def _prompts(
    stack: AsyncExitStack,
    run: Path,
    urls: str,
    kind: str,
    model: str | None,
    repeat: int,
    max_requests: int | None,
) -> tuple[Any, int]:
    from sandlot.rollout.policy import engine_at
    from sandlot.rollout.replay_tokens import chains_of, episodes_of
    from sandlot.trajectory.rundir import RunDir

    opened = RunDir.read(run)
    total = sum(turns for _, turns in episodes_of(opened)) * repeat
    asked = engine_at(urls, kind, model)
    stack.push_async_callback(asked.close)
    await asked.info()
    return chains_of(opened, asked, repeat=repeat, limit=max_requests), min(total, max_requests or total)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"the header {text!r} is none: write 'Name: value'")
    return name.strip(), value.strip()


def _show(results: Sequence[Result], seconds: float, as_json: bool) -> None:
    from sandlot.rollout.replay import summary

    found = summary(results, seconds)
    if as_json:
        print_json(found)
        return
    table = Table("", "mean", "p50", "p95", "p99", "max", box=None)
    for name, title in (
        ("latency_s", "latency, s"),
        ("first_content_s", "first content, s"),
        ("tokens_per_s_of_a_request", "tokens/s of a request"),
    ):
        if found[name]:
            table.add_row(title, *(f"{value:,.3f}" for value in found[name].values()))
    console.print(table)
    console.print(
        f"{found['ok']} of {found['requests']} answered in {seconds:.1f} s ({found['repeated']} tried again): "
        f"{found['requests_per_s']:g} requests/s, {found['output_tokens']:,} tokens, "
        f"{found['output_tokens_per_s']:g} tokens/s",
        highlight=False,
    )
    for error, count in found["errors"].items():
        console.print(f"[red]{count} ×[/] {escape(error)}", highlight=False, soft_wrap=True)
