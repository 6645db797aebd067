"""`python -m sandlot.engine.serve`: one embedded or scripted engine as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from sandlot.engine.backend import Backend
from sandlot.engine.server import make_app
from sandlot.errors import SandlotError

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # BLAS reads these once, when numpy is first imported, which therefore happens only after this line.
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(args.threads)
    try:
        backend = _load(args)
    except SandlotError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    asyncio.run(_serve(backend, args))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandlot.engine.serve", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint directory")
    parser.add_argument("--kind", choices=("embedded", "scripted"), default="embedded")
    parser.add_argument("--script", type=Path, help="the script file (only with --kind scripted)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port; the READY line names it")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--max-context", type=int, help="tokens of prompt and answer, at most the model's own limit")
    parser.add_argument("--max-running", type=int, default=32, help="sequences decoded together")
    parser.add_argument(
        "--cache-mb", type=int, default=_cache_mb(), help="memory for keys and values, prefix cache included"
    )
    parser.add_argument("--delay", type=float, default=0.0, help="seconds a scripted answer takes")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input is closed")
    return parser


def _cache_mb() -> int:
    """A quarter of the machine's memory, at most 8 GiB: the agents and graders beside it need the rest."""
    return min(8192, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 22)


def _load(args: argparse.Namespace) -> Backend:
    if args.kind == "scripted":
        from sandlot.engine.scripted.backend import ScriptedBackend

        if args.script is None:
            raise SandlotError("--kind scripted needs --script FILE")
        return ScriptedBackend.load(args.model, args.script, max_context=args.max_context, delay_s=args.delay)
    try:
        from sandlot.engine.embedded.backend import EmbeddedBackend
    except ImportError as e:
        raise SandlotError(f"the embedded engine cannot be loaded ({e}): pip install 'sandlot[engine]'") from e
    return EmbeddedBackend.load(
        args.model, max_context=args.max_context, max_running=args.max_running, cache_bytes=args.cache_mb << 20
    )


async def _serve(backend: Backend, args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if args.with_parent:
        await _watch_parent(stop)
    runner = web.AppRunner(make_app(backend), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, shutdown_timeout=1.0)
    try:
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"READY http://{host}:{port}", flush=True)
        await stop.wait()
    finally:
        await backend.close()
        await runner.cleanup()


async def _watch_parent(stop: asyncio.Event) -> None:
    """Set `stop` when the parent is gone: it holds the other end of our standard input."""

    class Watch(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            stop.set()

    await asyncio.get_running_loop().connect_read_pipe(Watch, sys.stdin)


if __name__ == "__main__":
    sys.exit(main())
