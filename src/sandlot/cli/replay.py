"""`sandlot replay`: send recorded requests again, to any compatible server, and measure it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from sandlot.cli.common import JsonFlag, answer, console, print_json, ticking
from sandlot.errors import ConfigError
from sandlot.terminal import literal

if TYPE_CHECKING:
    from sandlot.rollout.replay import Job, Result

_TIMEOUT_S = 600.0


def command(
    file: Annotated[Path | None, typer.Argument(help="JSONL, one recorded request a line.", show_default=False)] = None,
    base_url: Annotated[str | None, typer.Option(help="The server that gets the requests of FILE.")] = None,
    run: Annotated[Path | None, typer.Option(help="Instead of FILE: a run directory, asked by token ids.")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine URL that gets the prompts of --run.")] = None,
    engine_kind: Annotated[str | None, typer.Option(help="What it speaks: `vllm` (default) or `sglang`.")] = None,
    concurrency: Annotated[int, typer.Option("-j", "--concurrency", min=1, help="Requests at once.")] = 8,
    retries: Annotated[int, typer.Option(min=0, help="How often a failure that may pass is tried again.")] = 2,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Instead of as recorded.")] = None,
    keep_response_ids: Annotated[
        bool, typer.Option("--keep-response-ids", help="Leave `previous_response_id` for the server that gave it.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, help="How often all of it is sent.")] = 1,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for instead of the recorded one.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent the way each protocol wants it.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="`Name: value`; may be given again.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds for one try; default 600.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSONL with one line per request.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Send recorded requests to a server: OpenAI chat and Responses, Anthropic and Google, told apart line by line.

    With --run, the prompts of a run's journals go to an engine by token ids, each episode's one after another.
    """
    of_a_file = {
        "--base-url": base_url,
        "--stream or --no-stream": stream,
        "--keep-response-ids": keep_response_ids or None,
        "--api-key": api_key,
        "--header": header or None,
        "--timeout": timeout,
    }
    if file is not None and run is None:
        _refuse("a FILE of requests", {"--engine": engine, "--engine-kind": engine_kind})
        from sandlot.rollout.replay_requests import read_requests
        from sandlot.rollout.replay_send import Sender

        sender = partial(
            Sender,
            _address(base_url),
            api_key=None if api_key is None else _sendable("--api-key", api_key),
            headers=dict(_header(text) for text in header or ()),
            timeout_s=timeout or _TIMEOUT_S,
        )
        read = partial(read_requests, file, keep_response_ids=keep_response_ids)
        given = _requests(sender, read, model, stream, repeat, max_requests)
    elif file is None and run is not None:
        _refuse("--run", of_a_file)
        if engine is None or "://" not in engine:
            raise ConfigError("say which engine is asked: --engine http://HOST:PORT")
        given = _prompts(run, engine, engine_kind or "vllm", model, repeat, max_requests)
    else:
        raise ConfigError("give either a FILE of requests or --run RUN")
    if out is not None and file is not None and out.exists() and out.samefile(file):
        raise ConfigError(f"--out {out} is the file of the requests: name another for the results")

    results: list[Result] = []
    begin = time.monotonic()
    interrupted = False

    async def all_of_it(tick: Callable[[int, int], None]) -> None:
        nonlocal begin
        from sandlot.gateway.process import allow_many_connections
        from sandlot.rollout.replay import replay

        allow_many_connections()
        async with given as (chains, total):
            with _writing(out) as write:

                def on_result(result: Result) -> None:
                    results.append(result)
                    tick(len(results), total)
                    write(result)

                begin = time.monotonic()
                await replay(chains, concurrency=concurrency, retries=retries, on_result=on_result)

    try:
        with ticking("replaying") as tick:
            asyncio.run(all_of_it(tick))
    except KeyboardInterrupt:
        interrupted = True
        console.print(f"interrupted; what was answered until then ({len(results)} requests):")
    _show(results, time.monotonic() - begin, as_json)
    if interrupted:
        raise typer.Exit(130)
    if any(not result.ok for result in results):
        raise typer.Exit(1)


Chains = tuple["Iterable[Sequence[Job]]", int]
"""What is sent one after another, and how much of it there is in all."""


@asynccontextmanager
async def _requests(
    sender: Callable[[], Any],
    read: Callable[[], Iterator[Any]],
    model: str | None,
    stream: bool | None,
    repeat: int,
    limit: int | None,
) -> AsyncIterator[Chains]:
    """The requests of a file, read once to see that all can be sent, then again as they are, however big it is."""
    from sandlot.rollout.replay import Job

    total = 0
    for request in islice(read(), limit):
        total += 1
        if not (model or request.model):
            raise ConfigError(f"{request.name} names no model: give one with --model")

    def jobs(server: Any) -> Iterator[list[Job]]:
        for _ in range(repeat):
            for recorded in read():
                request = recorded.for_server(model=model, stream=stream)
                yield [Job(request.name, request.kind, partial(server.send, request))]

    async with sender() as server:
        yield islice(jobs(server), limit), min(total * repeat, limit or total * repeat)


@asynccontextmanager
async def _prompts(
    run: Path, urls: str, kind: str, model: str | None, repeat: int, limit: int | None
) -> AsyncIterator[Chains]:
    from sandlot.rollout.policy import engine_at
    from sandlot.rollout.replay_tokens import chains_of, episodes_of
    from sandlot.trajectory.rundir import RunDir

    opened = RunDir.read(run)
    episodes = episodes_of(opened)
    total = sum(turns for _, turns in episodes) * repeat
    asked = engine_at(urls, kind, model)
    try:
        await asked.info()
        chains = chains_of(opened, [name for name, _ in episodes], asked, repeat=repeat, limit=limit)
        yield chains, min(total, limit or total)
    finally:
        await asked.close()


def _refuse(what: str, options: dict[str, Any]) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{given[0]} has no meaning with {what}: leave it out")


def _address(url: str | None) -> str:
    from yarl import URL

    try:
        if url and URL(url).scheme in ("http", "https") and URL(url).host:
            return url
    except ValueError:
        pass
    raise ConfigError("say where the requests go: --base-url http://HOST:PORT")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"the header {text!r} is none: write 'Name: value'")
    return name.strip(), _sendable("--header", value.strip())


def _sendable(what: str, value: str) -> str:
    if not value.isprintable():
        raise ConfigError(f"{what} holds a line break or another control character: leave it out")
    return value


@contextmanager
def _writing(out: Path | None) -> Iterator[Callable[[Result], None]]:
    if out is None:
        yield lambda result: None
        return
    with out.open("wb") as file:

        def write(result: Result) -> None:
            file.write(msgspec.json.encode(asdict(result)) + b"\n")
            file.flush()

        yield write


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
    if table.row_count:
        answer.print(table)
    answer.print(
        f"{found['ok']} of {found['requests']} answered in {seconds:.1f} s ({found['repeated']} tried again): "
        f"{found['requests_per_s']:g} requests/s, {found['output_tokens']:,} tokens, "
        f"{found['output_tokens_per_s']:g} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
    for error, count in found["errors"].items():
        answer.print(f"[red]{count} ×[/] {literal(error)}", highlight=False, soft_wrap=True)
    if others := found["failed"] - sum(found["errors"].values()):
        answer.print(f"[red]{others} ×[/] something else; --out FILE has all of them", highlight=False, soft_wrap=True)
